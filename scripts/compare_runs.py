"""Compare finished or running trainings, side by side, from what each run recorded.

    python scripts/compare_runs.py runs/demo/RAND runs/demo/SSB-DBS-BR

The first run is what the others are compared with.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hparams import ArgumentParser, UserError, exit_on_user_error
from logger import read_metrics

HEAD = (
    "run", "epochs", "ZPR %", "ABL", "batches", "steps", "s / epoch", "time", "validation loss",
    "masked", "alignment",
)  # fmt: skip


def main() -> None:
    parser = ArgumentParser(
        description="Compare runs of train.py: padding (ZPR), average batch length in frames "
        "(ABL), batches, and decoder steps (the sum of the batches' lengths, which a GPU's time "
        "follows) are means over the epochs; seconds per epoch is the median, and time its change "
        "from the first run; the losses (masked: over real frames only) and the alignment score "
        "(1: on the diagonal) are the last validation's."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train.py")
    runs = parser.parse_args().runs
    rows = [summarise(run) for run in runs]
    first = rows[0]["seconds"]
    cells = [
        (
            run.name,
            str(row["epochs"]),
            f"{100 * row['zpr']:.2f}",
            f"{row['abl']:.1f}",
            f"{row['n_batches']:.1f}",
            f"{row['total_length']:,.0f}",
            f"{row['seconds']:.1f}",
            f"{100 * (row['seconds'] / first - 1):+.1f} %",
            f"{row['loss']:.4f}",
            f"{row['masked_loss']:.4f}",
            f"{row['diagonality']:.2f}",
        )
        for run, row in zip(runs, rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    for line in (HEAD, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |")


def summarise(run: Path) -> dict[str, float]:
    """Figures of one run.

    Raises:
        UserError: the folder has no record of an epoch and of a validation yet.
    """
    path = run / "metrics.jsonl"
    records = read_metrics(path)
    epochs = [record for record in records if record["event"] == "epoch"]
    validations = [record for record in records if record["event"] == "validation"]
    if not epochs or not validations:
        raise UserError(f"{path}: no epoch has been validated yet; let the run go on")
    means = {
        name: sum(record[name] for record in epochs) / len(epochs)
        for name in ("zpr", "abl", "n_batches", "total_length")
    }
    seconds = 60 * statistics.median(record["minutes"] for record in epochs)
    return {**validations[-1], **means, "epochs": len(epochs), "seconds": seconds}


if __name__ == "__main__":
    exit_on_user_error(main)
