"""Evaluate how well checkpoints speak: print a table, and write it and every clip's row as CSV.

    python scripts/evaluate.py -c runs/first/checkpoint_0*.pt
    python scripts/evaluate.py -c A.pt B.pt --filelist filelists/other.txt -o runs/A_and_B

Each clip of the list (by default, of the checkpoint's validation set) is predicted with teacher
forcing, for the losses, and spoken from its text alone, for everything else. The columns of
failures count clips:

    never stops     cut off at max_decoder_steps
    stops early     shorter than 75 % of the true clip
    skips           a word got hardly any attention
    repeats         attention went back
    breaks          attention was lost

MCD is that of mels as predicted, before their variance is restored. Definitions,
sources and how often they are wrong: docs/speech.md.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import (
    ArgumentParser,
    UserError,
    exit_on_user_error,
    make_folder,
    positive,
    progress_bar,
    seed,
)
from corpus.clips import load_clips
from data_utils import MelDataset, open_mels, validation_batches
from hparams import AUDIO
from loss_function import Tacotron2Loss
from model import Tacotron2
from speech import STOPS_EARLY, attention_errors, load_model, mel_cepstral_distortion, speak
from text import alphabet
from training.checkpoint import find_checkpoint
from training.validation import validate

FAILURES = ["never stops", "stops early", "skips", "repeats", "breaks"]


class Opened(NamedTuple):
    """A checkpoint to evaluate."""

    path: Path
    model: Tacotron2
    dataset: MelDataset  # the clips that it is evaluated on


def open_checkpoint(
    path: Path, overrides: str, filelist: str | None, data_dir: str | None, n_clips: int | None
) -> Opened:
    """Loads a model and its clips.

    Raises:
        UserError: one of them cannot be loaded.
    """
    changes = {"validation_files": filelist} if filelist else {}
    changes |= {"data_dir": data_dir} if data_dir else {}
    model = load_model(path, overrides, **changes)
    hparams = model.hparams
    clips = load_clips(hparams.validation_files, hparams)[:n_clips]
    dataset = MelDataset(clips, open_mels(clips, hparams), hparams.n_frames_per_step)
    return Opened(path, model, dataset)


def check_comparable(first: Opened, other: Opened) -> None:
    """Raises :class:`UserError` unless two checkpoints have the same clips, and losses of the same
    mels with the same padding."""
    for name in (*AUDIO, "batch_size", "n_frames_per_step"):
        value, other_value = (getattr(opened.model.hparams, name) for opened in (first, other))
        if value != other_value:
            problem = f"has {name}={other_value}, and {first.path} has {value}"
            raise UserError(f"{other.path}: {problem}; evaluate them apart, or with one batch_size")
    contents, other_contents = (
        [(clip.stamp, clip.text) for clip in opened.dataset.clips] for opened in (first, other)
    )
    if contents != other_contents:
        problem = f"has another validation set than {first.path}"
        raise UserError(f"{other.path}: {problem}: losses do not compare; give --filelist")


def evaluate_clips(model: Tacotron2, dataset: MelDataset, seed: int) -> pd.DataFrame:
    """Speaks each clip's text. Returns a row for each clip, with a column for each failure."""
    hop_seconds = model.hparams.hop_length / model.hparams.sampling_rate
    symbols, clips = alphabet(model.hparams.symbols), dataset.clips
    rows = {}
    spoken = speak(model, [clip.ids for clip in clips], seed, as_predicted=True)
    for i, speech in progress_bar(spoken, "speaking", len(clips), unit="clip"):
        clip, n_frames = clips[i], speech.mel.size(1)
        # A letter for each symbol; a phone such as @AH0 gives its @.
        letters = "".join(symbols[id][0] for id in clip.ids)
        errors = attention_errors(speech.alignment, letters, hop_seconds)
        rows[i] = {
            "clip": clip.path,
            "text": clip.text,
            "seconds": n_frames * hop_seconds,
            "true_seconds": clip.n_frames * hop_seconds,
            "distortion": mel_cepstral_distortion(speech.mel, dataset[i].mel.T),
            "never stops": not speech.stopped,
            "stops early": speech.stopped and n_frames < STOPS_EARLY * clip.n_frames,
            "skips": bool(errors.skipped),
            "repeats": errors.repeats > 0,
            "breaks": errors.breaks > 0,
        }
    return pd.DataFrame([rows[i] for i in range(len(clips))])


def evaluate(
    model: Tacotron2, dataset: MelDataset, seed: int
) -> tuple[dict[str, float], pd.DataFrame]:
    """Returns a model's row of the table, and the rows of its clips."""
    batches = validation_batches(dataset.clips, model.hparams)
    losses, _ = validate(model, dataset, batches, Tacotron2Loss())
    clips = evaluate_clips(model, dataset, seed)
    return {
        "loss": losses["loss"],
        "masked": losses["masked_loss"],
        "gate off by (s)": losses["stop_error"],
        **clips[FAILURES].sum(),
        "any of these %": 100 * clips[FAILURES].any(axis=1).mean(),
        "MCD (dB)": clips["distortion"].mean(),
        "duration off by %": 100 * (clips["seconds"] / clips["true_seconds"] - 1).abs().mean(),
    }, clips


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    many = (
        "files, or folders of runs, for their newest checkpoints (after learning_rate_decay they "
        "speak better than checkpoint_best.pt)"
    )
    add("-c", "--checkpoint", required=True, nargs="+", type=find_checkpoint, help=many)
    add("--filelist", metavar="LIST", help="clips to speak (default: the validation set)")
    folder = "folder that the list's paths start from (default: the setting of the checkpoint)"
    add("--data_dir", metavar="DIR", help=folder)
    add("--clips", type=positive, metavar="N", help="only the first N of them")
    written = "write PREFIX.csv and PREFIX_clips.csv (default %(default)s)"
    add("-o", "--output", type=Path, default="runs/evaluation", metavar="PREFIX", help=written)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="such as max_decoder_steps=2000")
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    args = parser.parse_args(argv)
    files = [Path(f"{args.output}{ending}.csv") for ending in ("", "_clips")]
    for file in files:
        if file.exists():
            raise UserError(f"{file}: exists already; give another -o, or remove it")
    opened = []
    for path in args.checkpoint:  # all of them, before the first is evaluated
        opened.append(open_checkpoint(path, args.hparams, args.filelist, args.data_dir, args.clips))
        check_comparable(opened[0], opened[-1])
    make_folder(args.output.parent, "give another -o")
    rows, clip_rows = [], []
    for path, model, dataset in opened:
        row, clips = evaluate(model, dataset, args.seed)
        rows.append({"checkpoint": str(path), **row})
        clips.insert(0, "checkpoint", str(path))
        clip_rows.append(clips)
    table = pd.DataFrame(rows)
    # Printed before it is written, since the disk may be full.
    print(table.to_string(index=False, float_format="{:.3f}".format))
    table.to_csv(files[0], index=False)
    pd.concat(clip_rows).to_csv(files[1], index=False)
    print(f"every clip: {files[1]}")


if __name__ == "__main__":
    exit_on_user_error(main)
