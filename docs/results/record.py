"""Prints the validations of finished runs as CSV, the form of the records beside this file.

    python docs/results/record.py runs/voice > docs/results/voice.csv
    python docs/results/record.py runs/{rates,batch,lrf}_* runs/gradient > docs/results/studies.csv

A run's folder is SERIES/PART/EXPERIMENT/seedN, as experiments.sh makes it. ``epoch`` and ``step``
count what the run had done by then, its start included. The columns from ``minutes`` on are means
over the epochs since the validation before.
"""

import sys
from pathlib import Path

import pandas as pd

SETTINGS = ["batch_size", "learning_rate", "lrf"]
LOSSES = ["loss", "masked_loss", "precise_loss", "precise_masked_loss", "diagonality"]
MEANS = ["minutes", "processor_minutes", "n_batches", "total_length", "zpr", "abl"]


def record(folder: Path) -> pd.DataFrame:
    """Returns a row for each validation of a run; none if it is not finished."""
    settings = pd.read_json(folder / "hparams.json", typ="series")
    events = pd.read_json(folder / "metrics.jsonl", lines=True)
    if events.epoch.max() + 1 < settings.epochs:
        print(f"left out, since it is not finished: {folder}", file=sys.stderr)
        return pd.DataFrame()
    rows = events[events.event == "validation"].set_index("epoch")
    epochs = events[events.event == "epoch"].set_index("epoch").reindex(columns=MEANS)
    last = pd.Series(rows.index, rows.index).reindex(epochs.index).bfill()  # validation of an epoch
    rows[MEANS] = epochs.groupby(last).mean()
    *_, series, part, experiment, _ = folder.resolve().parts
    labels = {"series": series, "part": part, "experiment": experiment, **settings[SETTINGS]}
    labels["seed"] = settings.seed
    rows = rows.reset_index().assign(**labels, epoch=rows.index + 1)
    return rows.reindex(columns=[*labels, "epoch", "step", *LOSSES, *MEANS])


def main() -> None:
    files = sorted(file for root in sys.argv[1:] for file in Path(root).rglob("metrics.jsonl"))
    rows = pd.concat([record(file.parent) for file in files], ignore_index=True)
    if rows.series.nunique() == 1:
        del rows["series"]
    print(rows.dropna(axis=1, how="all").to_csv(index=False, float_format="%.6g"), end="")


if __name__ == "__main__":
    main()
