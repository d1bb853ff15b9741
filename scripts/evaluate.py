"""Say how well checkpoints speak: a table, and CSV files of it and of every clip.

    python scripts/evaluate.py -c runs/first/checkpoint_0*.pt
    python scripts/evaluate.py -c A.pt B.pt --filelist filelists/other.txt -o runs/A_and_B

Each clip of the list (by default, the checkpoint's validation set) is predicted with teacher
forcing, for the losses, and spoken from its text alone, for all else. The columns of failures count
clips:

    never stops     cut off at max_decoder_steps
    stops early     shorter than 75 % of the true clip
    skips           a word got hardly any attention
    repeats         attention went back
    breaks          attention was lost

Definitions, sources and how often they are wrong: docs/speech.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
from corpus.clips import Clip, load_clips
from corpus.mels import open_mels
from data_utils import MelDataset, validation_batches
from hparams import AUDIO, format_overrides
from loss_function import Tacotron2Loss
from model import Tacotron2
from speech import STOPS_EARLY, attention_errors, load_model, mel_cepstral_distortion, speak
from text import alphabet
from training.checkpoint import checkpoint_file
from training.validation import validate

FAILURES = ["never stops", "stops early", "skips", "repeats", "breaks"]


def open_checkpoints(
    paths: Sequence[Path], overrides: str, filelist: str | None, n_clips: int | None
) -> list[tuple[Path, Tacotron2, MelDataset]]:
    """Loads all models and their clips, before the first is evaluated.

    Raises:
        UserError: one cannot be loaded, or does not compare with the first.
    """
    changes = {"validation_files": filelist} if filelist else {}
    opened: list[tuple[Path, Tacotron2, MelDataset]] = []
    for path in paths:
        model = load_model(path, overrides, **changes)
        clips = load_clips(model.hparams.validation_files, model.hparams)[:n_clips]
        longest = max(clips, key=lambda clip: clip.n_frames)
        r = model.hparams.n_frames_per_step
        if longest.n_frames >= (limit := r * model.max_decoder_steps):
            raise UserError(
                f"{longest.location}: has {longest.n_frames} frames, and speech is cut off after "
                f"{limit}; give --hparams max_decoder_steps={3 * longest.n_frames // (2 * r) + 1}"
            )
        if opened:
            refuse_others(path, model, clips, *opened[0])
        opened.append((path, model, MelDataset(clips, open_mels(clips, model.hparams), r)))
    return opened


def refuse_others(
    path: Path,
    model: Tacotron2,
    clips: Sequence[Clip],
    first_path: Path,
    first: Tacotron2,
    dataset: MelDataset,
) -> None:
    """Raises :class:`UserError` unless two checkpoints have the same validation set, and losses of
    the same mels with the same padding."""
    names = (*AUDIO, "batch_size", "n_frames_per_step")
    values = [{n: getattr(m.hparams, n) for n in names} for m in (model, first)]
    changed = [name for name in values[0] if values[0][name] != values[1][name]]
    if changed:
        ours, theirs = (format_overrides({n: each[n] for n in changed}) for each in values)
        fix = f"give --hparams {theirs}" if changed == ["batch_size"] else "evaluate them apart"
        raise UserError(
            f"{path}: has {ours}, and {first_path} has {theirs}, so their losses do not compare; "
            f"{fix}"
        )
    if [(c.stamp, c.text) for c in clips] != [(c.stamp, c.text) for c in dataset.clips]:
        raise UserError(
            f"{path}: has another validation set than {first_path}, so they do not compare; give "
            "--filelist"
        )


def evaluate_clips(model: Tacotron2, dataset: MelDataset, seed: int) -> pd.DataFrame:
    """Speaks each clip's text; returns a row for each clip, with a column for each failure."""
    hop_seconds = model.hparams.hop_length / model.hparams.sampling_rate
    symbols, clips = alphabet(model.hparams.symbols), dataset.clips
    rows = {}
    spoken = speak(model, [clip.ids for clip in clips], seed)
    for i, speech in progress_bar(spoken, "speaking", len(clips), unit="clip"):
        clip, n_frames = clips[i], speech.mel.size(1)
        letters = "".join(symbols[id][0] for id in clip.ids)  # of phones the first: @
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
            "skipped": " ".join(errors.skipped),
        }
    return pd.DataFrame([rows[i] for i in range(len(clips))])


def evaluate(
    model: Tacotron2, dataset: MelDataset, seed: int
) -> tuple[dict[str, float], pd.DataFrame]:
    """Returns a model's row of the table, and :func:`evaluate_clips`."""
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


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    many = (
        "files, or folders of runs, whose newest are meant (after learning_rate_decay the newest "
        "speaks better than checkpoint_best.pt)"
    )
    add("-c", "--checkpoint", required=True, nargs="+", type=checkpoint_file, help=many)
    add("--filelist", metavar="LIST", help="clips to speak (default: the validation set)")
    add("--clips", type=positive, metavar="N", help="only the first N of them")
    default = "for PREFIX.csv and PREFIX_clips.csv (default %(default)s)"
    add("-o", "--output", type=Path, default="runs/evaluation", metavar="PREFIX", help=default)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="such as max_decoder_steps=2000")
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    files = [Path(f"{args.output}{ending}.csv") for ending in ("", "_clips")]
    for file in files:
        if file.exists():
            raise UserError(f"{file}: exists already; give another -o, or remove it")
    opened = open_checkpoints(args.checkpoint, args.hparams, args.filelist, args.clips)
    make_folder(args.output.parent, "give another -o")
    rows, clips = [], []
    for path, model, dataset in opened:
        row, of_clips = evaluate(model, dataset, args.seed)
        rows.append({"checkpoint": str(path), **row})
        of_clips.insert(0, "checkpoint", str(path))
        clips.append(of_clips)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="{:.3f}".format))  # first: the disk may be full
    table.to_csv(files[0], index=False)
    pd.concat(clips).to_csv(files[1], index=False)
    print(f"every clip: {files[1]}")


if __name__ == "__main__":
    exit_on_user_error(main)
