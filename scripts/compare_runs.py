"""Compare finished or running runs side by side.

python scripts/compare_runs.py runs/demo/RAND runs/demo/SSB-DBS-BR
python scripts/compare_runs.py runs/table2                 # every run of run_all.sh
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from scripts.runs import (
    CHOICE,
    aligned,
    inequality,
    load_runs,
    names_of,
    unequal_conditions,
    unequal_losses,
)

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
VALIDATED = {"loss", "masked_loss", "diagonality"}  # depend on the validation set


def main() -> None:
    parser = ArgumentParser(
        description="Compare runs of train.py. Padding (ZPR), average batch length in frames "
        "(ABL), batches, and decoder steps (the sum of the batches' lengths, which the paper's GPU "
        "times follow) are means over the epochs. Seconds per epoch are the median; time is its "
        "change from the first run, if the two differ only in batching. The losses (masked: over "
        "real frames only) and the alignment score (1: on the diagonal) are the last validation's, "
        "left out where they do not compare with the first run's."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="outputs of train.py or run_all.sh")
    runs, problems = load_runs(parser.parse_args().runs)
    if not runs:
        raise UserError("\n".join(problems))
    first, names = runs[0], names_of(runs)
    rows, notes = [["run", *COLUMNS]], []
    for run, name in zip(runs, names, strict=True):
        values = run.averages() | (run.validations[-1] if run.validations else {})
        values["epochs"] = f"{run.done}/{run.settings['epochs']}"
        if reason := inequality(first, run, EXEMPT):
            notes.append(f"{names[0]} and {name}: times are not compared: {reason}")
        if other := unequal_losses(first, run):
            values = {name: value for name, value in values.items() if name not in VALIDATED}
            notes.append(f"{names[0]} and {name}: losses are not compared: {other}")
        elif first.settings["batch_size"] != run.settings["batch_size"]:
            values.pop("loss", None)  # counts padding
            notes.append(f"{names[0]} and {name}: of two batch sizes, only masked losses compare")
        alike = run is first or not (reason or unequal_conditions([first, run]))
        if run.epochs:
            values["seconds"] = 60 * values["minutes"]
            if first.epochs and alike:
                values["change"] = 100 * (values["minutes"] / first.averages()["minutes"] - 1)
        cells = [form.format(values[k]) if k in values else "–" for k, form in COLUMNS.values()]
        rows.append([name, *cells])
    if reason := unequal_conditions(runs):
        notes.append(f"times are not compared: {reason}")
    print(aligned(rows), *notes, sep="\n")
    if problems:
        raise UserError("\n".join(problems))


if __name__ == "__main__":
    exit_on_user_error(main)
