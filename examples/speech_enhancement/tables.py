"""Table 1 and Figure 4 of Gonzalez et al. (2023) from results of train.py: python tables.py RUNS

Reads RUNS/runs/*.json; writes RUNS/table1.md, RUNS/figure4.png and RUNS/results.json.
"""

import glob
import json
import sys
from pathlib import Path
from statistics import mean, median, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"RAND": "Random", "SB": "Sorted", "BKT": "Bucket"}
COLUMNS = """Strategy | Batch size | Seeds | Time | CPU time | Memory | ZPR | Largest batch
    | Updates | ΔSNR match | ΔSNR mismatch"""
NOTE = """
Time and CPU time: of the training, medians over seeds. Memory: median of the peak above that
before training. ZPR: zeros / data (eq. 1). Largest batch: with its padding. Updates: batches an
epoch. ΔSNR: mean ± standard error over seeds, in dB.
"""


def with_error(runs: list[dict], name: str) -> tuple[float, float | None]:
    """Returns the mean over seeds and its standard error, or None for that of one seed."""
    values = [run[name] for run in runs]
    return mean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def read_runs(folder: Path) -> dict[tuple, list[dict]]:
    """Returns the results of all seeds by strategy and batch size, in the paper's order."""
    files = sorted(glob.glob("runs/*.json", root_dir=folder))  # without hidden ones
    runs = [json.loads((folder / file).read_text()) for file in files]
    groups = {}
    for run in runs:
        place = list(NAMES).index(run["strategy"]), run["batch_seconds"] or 0, run["batch_size"]
        groups.setdefault(place, []).append(run)
    return dict(sorted(groups.items()))


def table(groups: dict[tuple, list[dict]]) -> str:
    """Returns Table 1, in Markdown."""
    columns = [column.strip() for column in COLUMNS.split("|")]
    rows = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    for (_, batch_seconds, batch_size), runs in groups.items():
        batch = f"{batch_size} seq." if batch_size else f"{batch_seconds:g} s"
        row = [NAMES[runs[0]["strategy"]], batch, str(len(runs))]
        for name, unit in (("seconds", "s"), ("cpu_seconds", "s"), ("memory_mb", "MB")):
            row.append(f"{median(run[name] for run in runs):.0f} {unit}")
        row.append(f"{mean(100 * run['zpr'] for run in runs):.1f} %")
        row.append(f"{max(run['largest_batch_seconds'] for run in runs):.1f} s")
        row.append(f"{mean(run['batches'] for run in runs):.0f}")
        for name in ("matched", "mismatched"):
            average, error = with_error(runs, name)
            row.append(f"{average:.2f}" if error is None else f"{average:.2f} ± {error:.2f}")
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def figure(groups: dict[tuple, list[dict]], path: Path) -> None:
    """Draws Figure 4: ΔSNR as a function of the dynamic batch size, on a logarithmic axis."""
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for ax, condition in zip(axes, ("matched", "mismatched"), strict=True):
        for strategy, label in NAMES.items():
            sizes, means, errors = [], [], []
            for (_, batch_seconds, _), runs in groups.items():
                if batch_seconds and runs[0]["strategy"] == strategy:
                    average, error = with_error(runs, condition)
                    sizes.append(batch_seconds)
                    means.append(average)
                    errors.append(error or 0)
            if sizes:
                ax.errorbar(sizes, means, errors, marker="o", capsize=3, label=label)
                ax.set_xscale("log", base=2)
                ax.set_xticks(sizes, [f"{seconds:g}" for seconds in sizes])
                ax.legend()
        ax.set(title=condition, xlabel="dynamic batch size (s)", ylabel="ΔSNR (dB)")
    fig.savefig(path, dpi=100)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    groups = read_runs(folder)
    runs = [run for group in groups.values() for run in group]
    (folder / "table1.md").write_text(table(groups) + NOTE)
    (folder / "results.json").write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    figure(groups, folder / "figure4.png")
    print(table(groups) + NOTE)
    print(f"{len(runs)} runs: {folder}/table1.md, {folder}/figure4.png, {folder}/results.json")
