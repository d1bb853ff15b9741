"""Prints the records of finished runs as CSV, the form of those beside this file.

    python docs/results/record.py runs/rates > docs/results/rates.csv
    python docs/results/record.py --speech runs/same_time > docs/results/same_time_speech.csv

A run's folder is SERIES/PART/EXPERIMENT/seedN, as experiments.sh makes it. A row is an epoch, with
the losses of the validation after it, if there was one; ``epoch`` and ``step`` count what the run
had done by then, its start included. With --speech a row is what evaluate.py wrote to speech0.csv,
speech1.csv and so on in a run's folder: for one seed of the prenet's dropout.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

VALUES = ["step", "training_loss", "grad_norm", "clipped", "loss", "masked_loss", "diagonality"]
VALUES += ["minutes", "processor_minutes", "n_batches", "total_length", "zpr", "abl"]


def epochs(folder: Path) -> pd.DataFrame:
    """Returns a row for each epoch of a run; none if it is not finished."""
    settings = pd.read_json(folder / "hparams.json", typ="series")
    events = pd.read_json(folder / "metrics.jsonl", lines=True)
    validations = events[events.event == "validation"].set_index("epoch")
    if settings.epochs - 1 not in validations.index:
        print(f"left out, since it is not finished: {folder}", file=sys.stderr)
        return pd.DataFrame()
    rows = events[events.event == "epoch"].set_index("epoch")
    rows.update(validations)
    steps = events[events.event == "step"].groupby("epoch")
    rows["grad_norm"] = steps.grad_norm.mean()  # before clipping
    rows["clipped"] = steps.grad_norm.agg(lambda x: (x > settings.grad_clip_thresh).mean())
    labels = label(folder) | dict(settings[["batch_size", "learning_rate", "lrf", "seed"]])
    labels["learning_rate"] = steps.learning_rate.last()  # at the end of the epoch
    labels["device"] = events.device.dropna().iloc[0]
    rows = rows.assign(**labels, epoch=rows.index + 1)
    return rows.reindex(columns=[*labels, "epoch", *VALUES])


def label(folder: Path) -> dict[str, str]:
    *_, series, part, experiment, _ = folder.resolve().parts
    return {"series": series, "part": part, "experiment": experiment}


def speech(folder: Path) -> pd.DataFrame:
    """Returns a row for each file of evaluate.py in a run's folder."""
    rows = []
    for file in sorted(folder.glob("speech[0-9].csv")):
        labels = label(folder) | {"seed": folder.name.removeprefix("seed")}
        labels["dropout_seed"] = file.stem.removeprefix("speech")
        rows.append(labels | pd.read_csv(file).iloc[0].to_dict())
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the records of finished runs as CSV.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders in which runs lie")
    parser.add_argument("--speech", action="store_true", help="the rows of evaluate.py")
    args = parser.parse_args()
    folders = sorted(file.parent for root in args.runs for file in root.rglob("metrics.jsonl"))
    rows = pd.concat([speech(f) if args.speech else epochs(f) for f in folders], ignore_index=True)
    if rows.series.nunique() == 1:
        del rows["series"]
    print(rows.dropna(axis=1, how="all").to_csv(index=False, float_format="%.6g"), end="")


if __name__ == "__main__":
    main()
