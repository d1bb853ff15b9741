"""Count the words that a speech recogniser gets wrong: in a checkpoint's validation clips as
recorded, in their mels through Griffin-Lim, and in what each checkpoint says of their texts.

    pip install pocketsphinx jiwer    # with an English language model
    python benchmarks/word_errors.py runs/A/checkpoint_best.pt runs/B/checkpoint_best.pt

The first row has the recogniser's own errors, the second adds those of Griffin-Lim, and the others
add the models'. Words left out, added or taken for others count alike. All checkpoints must have
one validation set. docs/speech.md and docs/results.md have the numbers.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import soxr
import torch
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, progress_bar
from corpus.audio import griffin_lim
from corpus.clips import load_clips, read_samples
from corpus.mels import open_mels
from speech import load_model, speak

RATE = 16_000  # Hz, the recogniser's


def words(text: str) -> str:
    return " ".join(re.findall("[a-z']+", text.lower()))


def recogniser() -> Callable[[ndarray, int], str]:
    """Returns a function from samples and their rate to the words heard."""
    import pocketsphinx

    decoder = pocketsphinx.Decoder(loglevel="FATAL")

    def hear(samples: ndarray, rate: int) -> str:
        samples = np.pad(soxr.resample(samples, rate, RATE), RATE // 5)  # silence at both ends
        samples += np.random.default_rng(0).normal(0, 1e-4, len(samples))  # which is never perfect
        decoder.start_utt()
        pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
        decoder.process_raw(pcm, full_utt=True)
        decoder.end_utt()
        return decoder.hyp().hypstr if decoder.hyp() else ""

    return hear


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="FILE", help="checkpoints")
    args = parser.parse_args()
    try:
        import jiwer

        hear = recogniser()
    except ImportError as error:
        raise UserError(f"{error}; pip install pocketsphinx jiwer") from None
    models = {path: load_model(path) for path in args.checkpoints}
    hparams = models[args.checkpoints[0]].hparams
    clips = load_clips(hparams.validation_files, hparams)
    mels = open_mels(clips, hparams)

    def report(name: str, sounds: Iterable[tuple[int, ndarray]]) -> None:
        heard = {
            i: hear(samples, hparams.sampling_rate)
            for i, samples in progress_bar(sounds, name, len(clips))
        }
        truth = [words(clip.text) for clip in clips]
        errors = jiwer.process_words(truth, [heard[i] for i in range(len(clips))])
        row = name, f"{100 * errors.wer:.1f}", errors.deletions, errors.insertions
        print(f"| {' | '.join(map(str, row))} |", flush=True)

    print(f"{len(clips)} sentences, {sum(len(words(c.text).split()) for c in clips)} words\n")
    print("| | word error rate % | words left out | words added |\n|---|--:|--:|--:|")
    report("recordings", ((i, read_samples(clip, hparams)) for i, clip in enumerate(clips)))
    true_mels = (torch.from_numpy(mels(clip)).T for clip in clips)
    report("their mels", ((i, griffin_lim(mel, hparams)) for i, mel in enumerate(true_mels)))
    for path, model in models.items():
        if load_clips(model.hparams.validation_files, model.hparams) != clips:
            raise UserError(f"{path}: has another validation set; name it in another call")
        spoken = speak(model, [clip.ids for clip in clips])
        report(str(path), ((i, griffin_lim(s.mel, model.hparams)) for i, s in spoken))


if __name__ == "__main__":
    exit_on_user_error(main)
