"""Say how well checkpoints speak: a table, and the same numbers as CSV and JSON.

    python scripts/evaluate.py -c runs/first/checkpoint_0*.pt
    python scripts/evaluate.py -c A.pt B.pt --filelist filelists/other.txt -o runs/A_and_B

Each clip of the list (by default, the checkpoint's validation set) is predicted with teacher
forcing, for the losses, and spoken from its text alone, for all else. The columns of failures count
clips:

    never stops     cut off at max_decoder_steps (if a clip is as long: at 1.5 times the longest)
    stops early     shorter than 75 % of the true clip
    skips           a word got hardly any attention
    repeats         attention went back
    breaks          attention was lost

Definitions, sources and how often they are wrong: docs/speech.md. Every clip is in the JSON file.
"""

import argparse
import csv
import io
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import (
    ArgumentParser,
    Stopped,
    StopSignals,
    UserError,
    exit_on_user_error,
    positive,
    progress_bar,
    seed,
)
from corpus.clips import Clip, check_samples, load_clips, refuse
from corpus.mels import MelCache, open_mels
from data_utils import MelDataset, collate, validation_batches
from files import make_folder, replacing
from hparams import AUDIO, HParams, format_overrides
from loaders import open_loader
from loss_function import Tacotron2Loss
from model import Tacotron2
from scripts.runs import aligned
from speech import STOPS_EARLY, attention_errors, load_model, mel_cepstral_distortion, speak
from text import alphabet
from training.checkpoint import load_checkpoint
from training.validation import validate

FAILURES = ("never stops", "stops early", "skips", "repeats", "breaks")
COLUMNS = {  # of the table: the number's name, its heading and its format
    "loss": ("loss", ".4f"),
    "masked_loss": ("masked", ".4f"),
    "stop_error": ("gate off by (s)", ".3f"),
    **{name: (name, "d") for name in FAILURES},
    "failed": ("any of these %", ".1f"),
    "distortion": ("MCD (dB)", ".2f"),
    "duration_error": ("duration off by %", ".1f"),
    "real_time_factor": ("RTF", ".2f"),
}


def evaluate(
    model: Tacotron2, clips: list[Clip], seed: int, stop: StopSignals
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """All numbers of a model, by the names of ``COLUMNS``, and those of each clip."""
    hparams = model.hparams
    dataset = MelDataset(clips, open_mels(clips, hparams))
    batches = validation_batches(clips, hparams)
    with open_loader(dataset, batches, collate, hparams.num_workers) as loader:
        scalars, _ = validate(model, loader, batches, Tacotron2Loss(), stop)

    hop_seconds, seconds, began = hparams.hop_length / hparams.sampling_rate, 0.0, time.monotonic()
    spoken = speak(model, [clip.ids for clip in clips], seed)
    rows: list[dict[str, Any]] = [{}] * len(clips)
    for i, speech in progress_bar(spoken, "speaking", len(clips), unit="clip"):
        seconds += time.monotonic() - began
        stop.check()
        clip, n_frames = clips[i], speech.mel.size(1)
        errors = attention_errors(speech.alignment, letters(clip, hparams), hop_seconds)
        failures = {
            "never stops": not speech.stopped,
            "stops early": speech.stopped and n_frames < STOPS_EARLY * clip.n_frames,
            "skips": bool(errors.skipped),
            "repeats": errors.repeats > 0,
            "breaks": errors.breaks > 0,
        }
        rows[i] = {
            "clip": clip.path,
            "text": clip.text,
            "seconds": n_frames * hop_seconds,
            "true_seconds": clip.n_frames * hop_seconds,
            "distortion": mel_cepstral_distortion(speech.mel, dataset[i].mel.T),
            "failures": [name for name, failed in failures.items() if failed],
            "skipped": errors.skipped,
        }
        began = time.monotonic()
    numbers = {name: scalars[name] for name in ("loss", "masked_loss", "stop_error")}
    for name in FAILURES:
        numbers[name] = sum(name in row["failures"] for row in rows)
    numbers["failed"] = 100 * statistics.mean(bool(row["failures"]) for row in rows)
    numbers["distortion"] = statistics.mean(row["distortion"] for row in rows)
    numbers["duration_error"] = 100 * statistics.mean(
        abs(row["seconds"] / row["true_seconds"] - 1) for row in rows
    )
    numbers["real_time_factor"] = seconds / sum(row["seconds"] for row in rows)
    return numbers, rows


def letters(clip: Clip, hparams: HParams) -> str:
    """A character for each symbol of a clip's text; phones begin with @."""
    symbols = alphabet(hparams.symbols)
    return "".join(symbols[i][0] for i in clip.ids)


def compare(results: list[dict[str, Any]]) -> str:
    """Which checkpoint has the lowest validation loss, and which speaks best."""
    by_loss = min(results, key=lambda result: result["loss"])
    if all(result["failed"] == 100 for result in results):
        return f"{by_loss['checkpoint']} has the lowest loss; none of them speaks: every clip fails"
    best = min(results, key=lambda result: (result["failed"], result["distortion"]))
    if best is by_loss:
        return f"{best['checkpoint']} has the lowest loss, and speaks best"
    pairs = zip(by_loss["clips"], best["clips"], strict=True)
    gains = [a["distortion"] - b["distortion"] for a, b in pairs]
    gain = f"{statistics.mean(gains):.2f} dB"
    if len(gains) > 1:
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        gain = f"{statistics.mean(gains):.2f} +- {error:.2f} dB (standard error)"
    better = f"the distortion is lower by {gain}"
    if best["failed"] < by_loss["failed"]:
        fails = f"{best['failed']:.1f} % of the clips fail instead of {by_loss['failed']:.1f} %"
        better = f"{fails}, and {better}"
    return (
        f"{by_loss['checkpoint']} has the lowest loss, but {best['checkpoint']} speaks better: "
        f"{better}"
    )


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table with a row for each checkpoint."""
    rows = [["checkpoint", "epoch", *(heading for heading, _ in COLUMNS.values())]]
    for result in results:
        numbers = [format(result[name], kind) for name, (_, kind) in COLUMNS.items()]
        rows.append([result["checkpoint"], str(result["epoch"]), *numbers])
    return aligned(rows)


def write(stem: Path, results: list[dict[str, Any]]) -> None:
    """Write ``stem``.csv, without the clips, and ``stem``.json."""
    file = io.StringIO()
    writer = csv.DictWriter(file, ["checkpoint", "epoch", *COLUMNS], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(results)
    for suffix, text in (("csv", file.getvalue()), ("json", json.dumps(results, indent=1) + "\n")):
        with replacing(Path(f"{stem}.{suffix}")) as output:
            output.write(text.encode())


def refuse_other_losses(path: Path, hparams: HParams, first: Path, others: HParams) -> None:
    """Raise :class:`UserError` unless the two checkpoints' losses are of the same mels, with the
    same padding."""
    changed = [n for n in (*AUDIO, "batch_size") if getattr(hparams, n) != getattr(others, n)]
    if changed:
        ours, theirs = (
            format_overrides({n: getattr(h, n) for n in changed}) for h in (hparams, others)
        )
        fix = f"give --hparams {theirs}" if changed == ["batch_size"] else "evaluate them apart"
        problem = f"{path}: has {ours}, and {first} has {theirs}"
        raise UserError(f"{problem}, so their losses do not compare; {fix}")


def step_limit(model: Tacotron2, clips: list[Clip]) -> int:
    """``max_decoder_steps``; 1.5 times the longest clip, if speaking that clip takes as many."""
    longest = max(clip.n_frames for clip in clips)
    limit = model.hparams.max_decoder_steps
    return limit if longest < limit else 3 * longest // 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=as_written)
    add = parser.add_argument
    add("-c", "--checkpoint", required=True, nargs="+", type=Path, help="one or many")
    add("--filelist", metavar="LIST", help="clips to speak (default: the validation set)")
    add("--clips", type=positive, metavar="N", help="only the first N of them")
    default = "for PREFIX.csv and PREFIX.json (default %(default)s)"
    add("-o", "--output", type=Path, default="runs/evaluation", metavar="PREFIX", help=default)
    add("--hparams", default="", metavar="NAME=VALUE,...", help="such as gate_threshold=0.3")
    add("--seed", type=seed, default=0, help="seed of the prenet's dropout (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    for suffix in ("csv", "json"):
        if Path(f"{args.output}.{suffix}").exists():
            fix = "give another -o, or remove it"
            raise UserError(f"{args.output}.{suffix}: exists already; {fix}")
    changes = {"validation_files": args.filelist} if args.filelist else {}
    loaded = []
    for path in args.checkpoint:  # all are checked before the first is evaluated
        model = load_model(path, args.hparams, **changes)
        hparams = model.hparams
        if loaded:
            refuse_other_losses(path, hparams, loaded[0][0], loaded[0][2])
        clips = load_clips(hparams.validation_files, hparams)[: args.clips]
        refuse(check_samples(MelCache(hparams).missing(clips), hparams))
        loaded.append((path, clips, hparams))
        first, others, _ = loaded[0]
        if [(c.stamp, c.text) for c in clips] != [(c.stamp, c.text) for c in others]:
            problem = f"{path}: has another validation set than {first}"
            raise UserError(f"{problem}, so they do not compare; give --filelist")
        if path == first and (limit := step_limit(model, clips)) > hparams.max_decoder_steps:
            print(
                f"note: clips are longer than max_decoder_steps={hparams.max_decoder_steps}; here "
                f"the limit is {limit}, 1.5 times the longest"
            )
    make_folder(args.output.parent, "give another -o")
    results = []
    with StopSignals() as stop:
        for path, clips, _ in loaded:
            model = load_model(path, args.hparams)
            model.max_decoder_steps = step_limit(model, clips)
            try:
                numbers, rows = evaluate(model, clips, args.seed, stop)
            except Stopped as stopped:
                sys.exit(stopped.status)
            epoch = load_checkpoint(path).get("progress", {}).get("epoch", "")
            results.append({"checkpoint": str(path), "epoch": epoch, **numbers, "clips": rows})
    print(table(results))  # first: the disk may be full
    if len(results) > 1:
        print(compare(results))
    write(args.output, results)
    print(f"every clip: {args.output}.json")


if __name__ == "__main__":
    exit_on_user_error(main)
