"""Table 1 and Figure 4 of Gonzalez et al. (2023) from results of train.py

Reads RUNS/runs/*.json; writes RUNS/table1.md, RUNS/figure4.png and RUNS/results.json.
"""

import argparse
import glob
import json
import math
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

NAMES = {"RAND": "Random", "SB": "Sorted", "BKT": "Bucket"}
COLUMNS = """Strategy | Batch size | Seeds | Time | CPU time | Memory | ZPR | Largest batch
    | Updates | ΔSNR match | ΔSNR mismatch"""
NOTE = """
Time and CPU time: of the training, medians over seeds. Memory: median of the peak above that
before training. ZPR: zeros / data (eq. 1). Largest batch: with its padding. Updates: batches an
epoch. ΔSNR: mean ± standard error over seeds, in dB.
"""
CONDITIONS = ["matched", "mismatched"]


def summarise(runs: list[dict]) -> pd.DataFrame:
    """Returns a row for each strategy and batch size, in the paper's order: over all seeds."""
    table = pd.DataFrame(runs).fillna({"batch_seconds": 0, "batch_size": 0})
    table["strategy"] = pd.Categorical(table.strategy, NAMES, ordered=True)
    groups = table.groupby(["strategy", "batch_seconds", "batch_size"], observed=True)
    medians = groups[["seconds", "cpu_seconds", "memory_mb"]].median()
    means = groups[["zpr", "batches", *CONDITIONS]].mean()
    errors = groups[CONDITIONS].sem().add_suffix("_error")
    largest = groups.largest_batch_seconds.max()
    return pd.concat([groups.size().rename("seeds"), medians, means, errors, largest], axis=1)


def write_table(summary: pd.DataFrame) -> str:
    """Returns Table 1, in Markdown."""
    columns = [column.strip() for column in COLUMNS.split("|")]
    rows = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    for row in summary.reset_index().itertuples():
        batch = f"{row.batch_size:.0f} seq." if row.batch_size else f"{row.batch_seconds:g} s"
        cells = [NAMES[row.strategy], batch, str(row.seeds)]
        cells += [f"{row.seconds:.0f} s", f"{row.cpu_seconds:.0f} s", f"{row.memory_mb:.0f} MB"]
        cells += [f"{100 * row.zpr:.1f} %", f"{row.largest_batch_seconds:.1f} s"]
        cells.append(f"{row.batches:.0f}")
        for condition in CONDITIONS:
            mean, error = getattr(row, condition), getattr(row, f"{condition}_error")
            cells.append(f"{mean:.2f}" + (f" ± {error:.2f}" if math.isfinite(error) else ""))
        rows.append(cells)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(summary: pd.DataFrame, path: Path) -> None:
    """Draws Figure 4: ΔSNR as a function of the dynamic batch size, on a logarithmic axis."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    dynamic = summary.query("batch_seconds > 0").reset_index()
    for axes, condition in zip(figure.subplots(1, 2), CONDITIONS, strict=True):
        for strategy, rows in dynamic.groupby("strategy", observed=True):
            errors = rows[f"{condition}_error"].fillna(0)
            style = {"marker": "o", "capsize": 3, "label": NAMES[strategy]}
            axes.errorbar(rows.batch_seconds, rows[condition], errors, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(rows.batch_seconds, [f"{seconds:g}" for seconds in rows.batch_seconds])
            axes.legend()
        axes.set(title=condition, xlabel="dynamic batch size (s)", ylabel="ΔSNR (dB)")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUNS")
    folder = parser.parse_args().folder
    files = sorted(glob.glob("runs/*.json", root_dir=folder))  # without hidden ones
    if not files:
        parser.error(f"{folder}/runs: has no results of train.py; name the folder of run.sh")
    runs = [json.loads((folder / file).read_text()) for file in files]
    order = [*NAMES]
    runs.sort(key=lambda run: (order.index(run["strategy"]), run["batch_seconds"] or 0))
    summary = summarise(runs)
    table = write_table(summary) + NOTE
    (folder / "table1.md").write_text(table)
    (folder / "results.json").write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    draw(summary, folder / "figure4.png")
    print(table)
    print(f"{len(runs)} runs: {folder}/table1.md, {folder}/figure4.png, {folder}/results.json")
