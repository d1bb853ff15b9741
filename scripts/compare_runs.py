"""Compare finished or running trainings, side by side, from what each run recorded.

    python scripts/compare_runs.py runs/demo/RAND runs/demo/SSB-DBS-BR
    python scripts/compare_runs.py runs/table2                 # every run of run_all.sh

The first run is what the others are compared with.
"""

import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from scripts.paper import EXPERIMENTS
from scripts.tables import CHOICE, Run, inequality, load_run, unequal_conditions

HEAD = (
    "run", "epochs", "ZPR %", "ABL", "batches", "steps", "s / epoch", "time", "validation loss",
    "masked", "alignment",
)  # fmt: skip
# What the runs may differ in, and their times be compared: the batching, and what takes no time.
BATCHING = {*CHOICE, "lrf", "batch_size", "batch_capacity", "batch_capacity_seconds"}
EXEMPT = {*BATCHING, "seed", "epochs_per_validation"}


def main() -> None:
    parser = ArgumentParser(
        description="Compare runs of train.py: padding (ZPR), average batch length in frames "
        "(ABL), batches, and decoder steps (the sum of the batches' lengths, which a GPU's time "
        "follows) are means over the epochs; seconds per epoch is the median, and time its change "
        "from the first run, if the two differ in their batching alone; the losses (masked: over "
        "real frames only) and the alignment score (1: on the diagonal) are the last validation's."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="output folders of train.py, or of run_all.sh"
    )
    runs, problems = find_runs(parser.parse_args().runs)
    names = names_of([run.path for run in runs])
    rows, notes = [], []
    for run, name in zip(runs, names, strict=True):
        first: Run | None = runs[0]
        if reason := inequality(first, run, EXEMPT):
            notes.append(f"{names[0]} and {name}: times are not compared: {reason}")
        if reason or (run is not first and unequal_conditions([first, run])):
            first = None
        done = run.epochs[-1]["epoch"] + 1 if run.epochs else 0
        rows.append([name, f"{done}/{run.settings['epochs']}", *cells_of(run, first)])
    if reason := unequal_conditions(runs):
        notes.append(f"times are not compared: {reason}")
    if rows:
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        for line in (HEAD, ["-" * width for width in widths], *rows):
            cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            print(f"| {' | '.join(cells)} |")
    for note in notes:
        print(note)
    if problems:
        raise UserError("\n".join(problems))


def find_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs that ``folders`` are or hold, and what is wrong with those that cannot be read."""
    runs, problems = [], []
    order = {name: i for i, name in enumerate(EXPERIMENTS)}
    for folder in folders:
        paths = [path.parent for path in folder.rglob("hparams.json")]
        if not paths:
            problems.append(f"{folder}: holds no run; name an output of train.py or run_all.sh")
        found = []
        for path in sorted(paths):
            try:
                found.append(load_run(path))
            except UserError as error:
                problems.append(str(error))
        runs += sorted(found, key=lambda r: (order.get(r.experiment, 99), r.settings["seed"]))
    return runs, problems


def names_of(paths: Sequence[Path]) -> list[str]:
    """The end of each path: as much as tells them apart, and the parent of a "seed0"."""
    parts = [path.resolve().parts for path in paths]
    least = 1 + any(path.name.startswith("seed") for path in paths)
    lengths = itertools.count(least)
    n = next(n for n in lengths if len({part[-n:] for part in parts}) == len(set(parts)))
    return ["/".join(part[-n:]) for part in parts]


def seconds_of(run: Run) -> float:
    """The median of its epochs."""
    return 60 * statistics.median(record["minutes"] for record in run.epochs)


def cells_of(run: Run, first: Run | None) -> list[str]:
    """A run's columns after its epochs; its time is compared with that of ``first``, if given."""
    cells = ["–"] * (len(HEAD) - 2)
    if run.epochs:
        zpr, abl, batches, steps = (
            statistics.mean(record[name] for record in run.epochs)
            for name in ("zpr", "abl", "n_batches", "total_length")
        )
        seconds = seconds_of(run)
        cells[:5] = (
            f"{100 * zpr:.2f}",
            f"{abl:.1f}",
            f"{batches:.1f}",
            f"{steps:,.0f}",
            f"{seconds:.1f}",
        )
        if first and first.epochs:
            cells[5] = f"{100 * (seconds / seconds_of(first) - 1):+.1f} %"
    if run.validations:
        last = run.validations[-1]
        cells[6:] = (
            f"{last['loss']:.4f}",
            f"{last['masked_loss']:.4f}",
            f"{last['diagonality']:.2f}",
        )
    return cells


if __name__ == "__main__":
    exit_on_user_error(main)
