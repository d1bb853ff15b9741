"""Compare finished or running trainings, side by side, from what each run recorded.

    python scripts/compare_runs.py runs/demo/RAND runs/demo/SSB-DBS-BR
    python scripts/compare_runs.py runs/table2                 # every run of run_all.sh

The others are compared with the first run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from scripts.runs import CHOICE, Run, find_runs, inequality, unequal_conditions

HEAD = (
    "run", "epochs", "ZPR %", "ABL", "batches", "steps", "s / epoch", "time", "validation loss",
    "masked", "alignment",
)  # fmt: skip
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
    rows, notes = [], []
    for run, name in zip(runs, names, strict=True):
        reason = inequality(runs[0], run, EXEMPT)
        if reason:
            notes.append(f"{names[0]} and {name}: times are not compared: {reason}")
        comparable = not reason and (run is runs[0] or not unequal_conditions([runs[0], run]))
        rows.append([name, *cells_of(run, runs[0] if comparable else None)])
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


def short_names(paths: Sequence[Path]) -> list[str]:
    """The end of each path: as much as tells them apart, and the parent of a "seed0"."""
    parts = [path.resolve().parts for path in paths]
    length = 2 if any(path.name.startswith("seed") for path in paths) else 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def cells_of(run: Run, first: Run | None) -> list[str]:
    """A run's row after its name; its time is compared with that of ``first``, if given."""
    done = run.epochs[-1]["epoch"] + 1 if run.epochs else 0
    cells = [f"{done}/{run.settings['epochs']}", *["–"] * (len(HEAD) - 2)]
    if values := run.averages():
        cells[1:6] = (
            f"{values['zpr']:.2f}",
            f"{values['abl']:.1f}",
            f"{values['n_batches']:.1f}",
            f"{values['total_length']:,.0f}",
            f"{60 * values['minutes']:.1f}",
        )
        if first and first.epochs:
            change = values["minutes"] / first.averages()["minutes"] - 1
            cells[6] = f"{100 * change:+.1f} %"
    if run.validations:
        last = run.validations[-1]
        cells[7:] = (
            f"{last['loss']:.4f}",
            f"{last['masked_loss']:.4f}",
            f"{last['diagonality']:.2f}",
        )
    return cells


if __name__ == "__main__":
    exit_on_user_error(main)
