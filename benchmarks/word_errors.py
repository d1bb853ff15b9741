"""Count the words that a speech recogniser gets wrong: in a checkpoint's validation clips as
recorded, in their mels through Griffin-Lim, and in what each checkpoint says of their texts.

    pip install faster-whisper jiwer
    python benchmarks/word_errors.py runs/A/checkpoint_best.pt runs/B/checkpoint_best.pt

The recogniser is Whisper (Radford et al. 2022), of English. The first row has its own errors, the
second adds those of Griffin-Lim, and the others add the models'. Words left out, added or taken for
others count alike. All checkpoints must have one validation set. docs/speech.md has the numbers.
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
from text.cleaners import english_cleaners

RATE = 16_000  # Hz, the recogniser's


def words(text: str) -> str:
    return " ".join(re.findall("[a-z']+", english_cleaners(text)))  # which writes numbers out


def recogniser(name: str) -> Callable[[ndarray, int], str]:
    """Returns a function from samples and their rate to the words heard.

    Raises:
        UserError: there is no such recogniser, or it cannot be downloaded.
    """
    from faster_whisper import WhisperModel

    try:
        whisper = WhisperModel(name, device="cpu", compute_type="int8")
    except Exception as error:  # of many libraries
        reason, *_ = [*str(error).splitlines(), type(error).__name__]
        fix = "name a Whisper model or the folder of one"
        raise UserError(f"--recogniser {name}: {reason}; {fix}") from None

    def hear(samples: ndarray, rate: int) -> str:
        samples = np.pad(soxr.resample(samples, rate, RATE), RATE // 5)  # silence at both ends
        segments, _ = whisper.transcribe(
            samples.astype(np.float32), language="en", temperature=0, without_timestamps=True
        )
        return words(" ".join(segment.text for segment in segments))

    return hear


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="FILE", help="checkpoints")
    parser.add_argument(
        "--recogniser",
        default="tiny.en",
        metavar="NAME",
        help="a Whisper model of English, which is downloaded, or a folder with one (tiny.en)",
    )
    args = parser.parse_args()
    try:
        import jiwer

        hear = recogniser(args.recogniser)
    except ImportError as error:
        raise UserError(f"{error}; pip install faster-whisper jiwer") from None
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
