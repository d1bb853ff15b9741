"""Compare finished or running trainings, side by side, from what each run recorded.

    python scripts/compare_runs.py runs/demo/RAND runs/demo/SSB-DBS-BR
    python scripts/compare_runs.py runs/table2                 # every run of run_all.sh

The others are compared with the first run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from scripts.runs import CHOICE, Run, find_runs, inequality, unequal_conditions

COLUMNS = {  # heading: quantity, format
    "epochs": ("epochs", "{}"),
    "ZPR %": ("zpr", "{:.2f}"),
    "ABL": ("abl", "{:.1f}"),
    "batches": ("n_batches", "{:.1f}"),
    "steps": ("total_length", "{:,.0f}"),
    "s / epoch": ("seconds", "{:.1f}"),
    "time": ("change", "{:+.1f} %"),
    "validation loss": ("loss", "{:.4f}"),
    "masked": ("masked_loss", "{:.4f}"),
    "alignment": ("diagonality", "{:.2f}"),
}
# Runs may differ in these and still compare in time: the batching, and what takes no time.
EXEMPT = {*CHOICE, "lrf", "batch_size", "batch_capacity", "batch_capacity_seconds"}
EXEMPT |= {"seed", "epochs_per_validation"}


def main() -> None:
    parser = ArgumentParser(
        description="Compare runs of train.py. Padding (ZPR), average batch length in frames "
        "(ABL), batches, and decoder steps (the sum of the batches' lengths, which a GPU's time "
        "follows) are means over the epochs. Seconds per epoch are the median; time is its change "
        "from the first run, if the two differ only in batching. The losses (masked: over "
        "real frames only) and the alignment score (1: on the diagonal) are the last validation's."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="outputs of train.py or run_all.sh")
    runs, problems = find_runs(parser.parse_args().runs)
    names = short_names([run.path for run in runs])
    table, notes = [["run", *COLUMNS]], []
    for run, name in zip(runs, names, strict=True):
        reason = inequality(runs[0], run, EXEMPT)
        if reason:
            notes.append(f"{names[0]} and {name}: times are not compared: {reason}")
        comparable = not reason and (run is runs[0] or not unequal_conditions([runs[0], run]))
        values = quantities(run, runs[0] if comparable else None)
        cells = [
            form.format(values[key]) if key in values else "–" for key, form in COLUMNS.values()
        ]
        table.append([name, *cells])
    if reason := unequal_conditions(runs):
        notes.append(f"times are not compared: {reason}")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    for line in table if runs else []:
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print(f"| {' | '.join(cells)} |")
    for note in notes:
        print(note)
    if problems:
        raise UserError("\n".join(problems))


def short_names(paths: Sequence[Path]) -> list[str]:
    """The end of each path: as much as tells them apart, and the parent of a "seed0"."""
    parts = [path.resolve().parts for path in paths]
    length = 2 if any(path.name.startswith("seed") for path in paths) else 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def quantities(run: Run, first: Run | None) -> dict[str, Any]:
    """What a run's row shows; its time is compared with that of ``first``, if given."""
    values = dict(run.validations[-1]) if run.validations else {}
    done = run.epochs[-1]["epoch"] + 1 if run.epochs else 0
    values["epochs"] = f"{done}/{run.settings['epochs']}"
    if run.epochs:
        values |= run.averages()
        values["seconds"] = 60 * values["minutes"]
        if first and first.epochs:
            values["change"] = 100 * (values["minutes"] / first.averages()["minutes"] - 1)
    return values


if __name__ == "__main__":
    exit_on_user_error(main)
