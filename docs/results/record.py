"""Prints the records of finished runs as CSV, the form of those beside this file.

    python docs/results/record.py runs/voice > docs/results/voice.csv
    python docs/results/record.py --epochs runs/same_time > docs/results/same_time.csv
    python docs/results/record.py --speech runs/same_time > docs/results/same_time_speech.csv

A run's folder is SERIES/PART/EXPERIMENT/seedN, as experiments.sh makes it. There is a row for each
validation; ``epoch`` and ``step`` count what the run had done by then, its start included, and the
columns from ``minutes`` on are means over the epochs since the validation before. With --epochs
there is a row for each epoch, with its own values. With --speech the rows are those that
evaluate.py wrote to speech0.csv, speech1.csv and so on in a run's folder: one for each seed of the
prenet's dropout.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

SETTINGS = ["batch_size", "learning_rate", "lrf"]
LOSSES = ["loss", "masked_loss", "diagonality"]
OF_STEPS = ["training_loss", "grad_norm", "clipped"]  # means over an epoch's
MEANS = ["minutes", "processor_minutes", "n_batches", "total_length", "zpr", "abl"]


def record(folder: Path, every_epoch: bool) -> pd.DataFrame:
    """Returns a row for each validation, or each epoch, of a run; none if it is not finished."""
    settings = pd.read_json(folder / "hparams.json", typ="series")
    events = pd.read_json(folder / "metrics.jsonl", lines=True)
    if events.epoch.max() + 1 < settings.epochs:
        print(f"left out, since it is not finished: {folder}", file=sys.stderr)
        return pd.DataFrame()
    rows = events[events.event == "validation"].set_index("epoch")
    epochs = events[events.event == "epoch"].set_index("epoch")
    labels = label(folder) | {**settings[SETTINGS], "seed": settings.seed}
    if every_epoch:
        steps = events[events.event == "step"].groupby("epoch")
        labels["learning_rate"] = steps.learning_rate.last()  # at the end of the epoch
        epochs["grad_norm"] = steps.grad_norm.mean()  # before clipping
        epochs["clipped"] = steps.grad_norm.agg(lambda x: (x > settings.grad_clip_thresh).mean())
        labels["device"] = events.device.dropna().iloc[0]
        columns = epochs.reindex(columns=["step", *OF_STEPS, *MEANS])
        rows = columns.join(rows.reindex(columns=LOSSES))
    else:
        last = pd.Series(rows.index, rows.index).reindex(epochs.index).bfill()  # validation
        rows[MEANS] = epochs.reindex(columns=MEANS).groupby(last).mean()
    rows = rows.assign(**labels, epoch=rows.index + 1)
    columns = OF_STEPS if every_epoch else []
    return rows.reindex(columns=[*labels, "epoch", "step", *columns, *LOSSES, *MEANS])


def label(folder: Path) -> dict[str, str]:
    *_, series, part, experiment, _ = folder.resolve().parts
    return {"series": series, "part": part, "experiment": experiment}


def speech(folder: Path) -> pd.DataFrame:
    """Returns a row for each file of evaluate.py in a run's folder."""
    files = sorted(folder.glob("speech[0-9].csv"))
    labels = label(folder) | {"seed": folder.name.removeprefix("seed")}
    rows = []
    for file in files:
        values = pd.read_csv(file).iloc[0].to_dict()
        rows.append(labels | {"dropout_seed": file.stem.removeprefix("speech")} | values)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the records of finished runs as CSV.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders in which runs lie")
    parser.add_argument("--epochs", action="store_true", help="a row for each epoch")
    parser.add_argument("--speech", action="store_true", help="the rows of evaluate.py")
    args = parser.parse_args()
    folders = sorted(file.parent for root in args.runs for file in root.rglob("metrics.jsonl"))
    tables = [speech(f) if args.speech else record(f, args.epochs) for f in folders]
    rows = pd.concat(tables, ignore_index=True)
    if rows.series.nunique() == 1:
        del rows["series"]
    print(rows.dropna(axis=1, how="all").to_csv(index=False, float_format="%.6g"), end="")


if __name__ == "__main__":
    main()
