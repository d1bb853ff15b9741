"""Compare ways to turn a mel into sound, by the sound's distance from it, and their time.

    python scripts/make_demo_corpus.py corpus --clips 8
    python benchmarks/bench_griffin_lim.py corpus/wavs/*.wav

First by how magnitudes come from the mel, then by how Griffin-Lim finds phases for them. Means over
the sounds: of the difference of the sound's log-mel from the given one, in dB; of the spectral
convergence ||S - |STFT(sound)|| / ||S||, S being the magnitudes from the mel, or the recording's;
and of the CPU seconds that a second of sound takes.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import librosa
import numpy as np
import soundfile
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from hparams import PRESETS, HParams, create_hparams
from layers import MelSpectrogram, magnitudes, mel_basis

ITERATIONS, MOMENTA = (16, 32, 60, 100, 200), (0, 0.5, 0.99)
DECIBELS = 20 / np.log(10)  # of a natural logarithm


def pseudo_inverse(mel: Tensor, hparams: HParams) -> np.ndarray:
    """The smallest magnitudes that have this mel, without the negative ones."""
    return np.maximum(np.linalg.pinv(mel_basis(hparams)) @ mel.double().exp().numpy(), 0)


def least_squares(mel: Tensor, hparams: HParams) -> np.ndarray:
    """librosa's non-negative least squares, of 64 frames at a time: it takes much memory."""
    basis, frames = mel_basis(hparams), mel.double().exp().numpy()
    parts = np.split(frames, range(64, frames.shape[1], 64), axis=1)
    return np.concatenate([librosa.util.nnls(basis, part) for part in parts], axis=1)


INVERSIONS = {
    "pseudo-inverse": pseudo_inverse,
    "least squares": least_squares,
    "updates": magnitudes,
}


def measure(
    sound: np.ndarray,
    hparams: HParams,
    invert: Callable,
    power: float,
    n_iter: int,
    momentum: float,
) -> tuple[float, ...]:
    """The difference in dB, both convergences, and the seconds."""
    options = {"hop_length": hparams.hop_length, "win_length": hparams.win_length}
    options["n_fft"] = hparams.filter_length
    spectrogram = MelSpectrogram(hparams)
    mel = spectrogram(torch.from_numpy(sound))
    began = time.process_time()
    S = invert(mel, hparams).astype(np.float32)
    S = S**power * (np.linalg.norm(S) / np.linalg.norm(S**power))  # as loud as before
    again = librosa.griffinlim(S, n_iter=n_iter, momentum=momentum, random_state=0, **options)
    seconds = (time.process_time() - began) / (len(sound) / hparams.sampling_rate)
    difference = (spectrogram(torch.from_numpy(again)) - mel).abs().mean().item() * DECIBELS
    ours, theirs = (np.abs(librosa.stft(x, pad_mode="reflect", **options)) for x in (again, sound))
    convergences = [np.linalg.norm(X - ours) / np.linalg.norm(X) for X in (S, theirs)]
    return difference, *convergences, seconds


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wavs", nargs="+", type=Path, help="recordings of speech")
    presets, sounds = [create_hparams(preset=name) for name in PRESETS], []
    for path in parser.parse_args().wavs:
        try:
            sound, rate = soundfile.read(path, dtype="float32")
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); name wav files") from None
        if sound.ndim > 1 or rate != HParams.sampling_rate or len(sound) < 2 * rate // 10:
            raise UserError(f"{path}: use 0.2 s or more of mono sound of 22050 Hz")
        sounds.append(sound)

    settings = [(name, power, 60, 0.99) for name in INVERSIONS for power in (1, 1.2)]
    settings += [("updates", 1, n_iter, momentum) for momentum in MOMENTA for n_iter in ITERATIONS]
    print("| preset | magnitudes | power | iterations | momentum ", end="")
    print("| mel dB | of mel | of recording | CPU s |\n|---|---|" + 7 * "--:|")
    for preset, hparams in zip(PRESETS, presets, strict=True):
        for name, *setting in settings:
            rows = [measure(sound, hparams, INVERSIONS[name], *setting) for sound in sounds]
            difference, of_mel, of_recording, seconds = np.mean(rows, axis=0)
            print("|", preset, "|", name, "|", *(f"{value} |" for value in setting), end=" ")
            print(f"{difference:.2f} | {of_mel:.3f} | {of_recording:.3f} | {seconds:.2f} |")


if __name__ == "__main__":
    exit_on_user_error(main)
