"""Draw the paper's Figure 4 and two figures that it lacks, from what runs of train.py recorded.

    python scripts/figures.py runs/table2                      # the output of run_all.sh

figure4.png: validation loss over epochs. loss_over_time.png: the same over training time.
time_over_steps.png: time saved against RAND, over decoder steps saved. plot_batching.py draws
Figures 1-3.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import UserError, exit_on_user_error
from scripts.paper import EXPERIMENTS, PAPER
from scripts.runs import LEAST_VALIDATIONS, Run, Series, losses_of, smoothed
from scripts.tables import Results, mean, parse_args, read_results, reduction

if TYPE_CHECKING:  # matplotlib and numpy load inside main(), where Ctrl-C is handled
    from matplotlib.axes import Axes

# A colour of Okabe and Ito's for each strategy; the line style tells which operations are on.
COLOURS = {"RAND": "#000000", "SB": "#D55E00", "SSB": "#0072B2", "BKT": "#009E73", "ATS": "#CC79A7"}
LINES = {"": ":", "BR": "--", "DBS": "-.", "DBS-BR": "-"}
LINE_NOTE = "dotted: neither DBS nor BR   dashed: BR   dash-dotted: DBS   solid: both, and RAND   "
LINE_NOTE += "shaded: range over seeds"
FIGURE4 = [name for name in EXPERIMENTS if not name.startswith(("BKT", "ATS"))]  # the paper's
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def style(experiment: str) -> dict[str, Any]:
    strategy, _, operations = experiment.partition("-")
    line = "-" if experiment == "RAND" else LINES[operations]
    return {"color": COLOURS.get(strategy, "#777777"), "linestyle": line}


def label_ends(ax: "Axes", ends: Iterable[tuple[str, float, float]], gap: float = 0.045) -> None:
    """Name each point right of the axes, at its height or, where names would overlap, near it."""
    import numpy as np

    ends = sorted(ends, key=lambda end: end[2])
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = np.array([to_axes.transform((x, y))[1] for _, x, y in ends])
    labels = heights.copy()
    for i in range(1, len(labels)):
        labels[i] = max(labels[i], labels[i - 1] + gap)
    labels -= (labels - heights).mean()  # half of what was pushed up goes down
    labels += max(-labels[0], 0) - max(labels[-1] - 1, 0)
    for (experiment, x, y), height in zip(ends, labels, strict=True):
        ax.annotate(
            experiment, (x, y), (1.02, height), textcoords="axes fraction", va="center",
            color=style(experiment)["color"], fontsize=9, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": "#999999", "lw": 0.7, "linestyle": ":", "shrinkA": 1,
                "shrinkB": 4, "relpos": (0, 0.5),
            },
        )  # fmt: skip


def draw_losses(
    ax: "Axes",
    runs: Sequence[Run],
    series: Series,
    experiments: Iterable[str],
    minutes: dict[str, float] | None = None,
) -> None:
    """Validation losses over epochs, mean over seeds with their range.

    With the ``minutes`` of an epoch of each experiment: over training time.
    """
    import numpy as np
    from matplotlib.ticker import MaxNLocator, NullLocator

    curves = {}
    for experiment in experiments:
        losses = [losses_of(run, series) for run in runs if run.experiment == experiment]
        if longest := max(map(len, losses), default=0):  # the seeds that have come furthest
            curves[experiment] = [curve for curve in losses if len(curve) == longest]
    if not curves:
        raise UserError("no run has been validated yet; let them go on")
    smooth = min(len(losses[0]) for losses in curves.values()) >= LEAST_VALIDATIONS
    # The steep start would hide how the strategies differ.
    start = next((i for i, e in enumerate(series.epochs) if e >= 0.2 * series.planned), 0)
    if minutes:
        total = 60 * series.planned * max(minutes[name] for name in curves)
        unit, seconds = next((u for u in UNITS if total > 2 * u[1]), UNITS[-1])
    ends = []
    for experiment, losses in curves.items():
        losses = np.array([smoothed(curve) if smooth else curve for curve in losses])
        x = np.array(series.epochs[: losses.shape[1]], dtype=float)
        if minutes:
            x *= 60 * minutes[experiment] / seconds
        shown = slice(min(start, len(x) - 1), None)
        x, losses = x[shown], losses[:, shown]
        marker = "o" if len(x) == 1 else None
        ax.plot(x, losses.mean(0), marker=marker, linewidth=1.8, **style(experiment))
        if len(losses) > 1:
            colour = style(experiment)["color"]
            ax.fill_between(x, losses.min(0), losses.max(0), alpha=0.12, linewidth=0, color=colour)
        ends.append((experiment, x[-1], losses.mean(0)[-1]))
    if minutes:
        ax.set_xlabel(f"training time ({unit})")
    else:
        ax.set_xlabel("epochs")
        ax.xaxis.get_major_locator().set_params(integer=True)
    unsmoothed = f"\nnot smoothed: a run has fewer than {LEAST_VALIDATIONS} validations"
    ax.set_ylabel(f"validation loss (RAND batches){', smoothed' if smooth else unsmoothed}")
    ax.set_title(LINE_NOTE, loc="left", fontsize=8, color="#555555")
    ax.set_yscale("log")  # the strategies part where losses are small
    ax.yaxis.set_major_locator(MaxNLocator(8))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    label_ends(ax, ends)


def draw_savings(ax: "Axes", results: Results) -> None:
    """Time saved against RAND over decoder steps saved: on the line, the steps explain it all."""
    random, points = PAPER["RAND"], []
    # With batches of a fixed size, the paper's steps are in proportion to the batch length.
    rows = [row for name, row in PAPER.items() if name != "RAND" and "DBS" not in name]
    paper_steps = [100 * (1 - row["abl"] / random["abl"]) for row in rows]
    paper_times = [100 * (1 - row["minutes"] / random["minutes"]) for row in rows]
    for experiment in results:
        steps = reduction(results, experiment, "total_length")
        time = reduction(results, experiment, "minutes")
        if experiment != "RAND" and not math.isnan(steps.mean + time.mean):
            points.append((experiment, steps.mean, time.mean))
            error = 0 if math.isnan(time.error) else time.error
            colour = style(experiment)["color"]
            ax.errorbar(steps.mean, time.mean, error, fmt="o", color=colour, capsize=3)
    if not points:
        raise UserError("needs an epoch of RAND and of another experiment")
    label = f"the paper's {len(rows)} of a fixed batch size"
    ax.plot(paper_steps, paper_times, "o", mfc="none", color="#888888", label=label, markersize=5)
    steps = paper_steps + [x for _, x, _ in points]
    ends = [min(steps) - 4, max(steps) + 4]
    ax.plot(ends, ends, color="#888888", linewidth=1, label="time follows the steps")
    ax.set_xlim(*ends)
    ax.set_xlabel("decoder steps saved against RAND (%): sum of batch lengths")
    ax.set_ylabel("training time saved against RAND (%)")
    ax.legend(frameon=False, loc="upper left")
    label_ends(ax, points)


def main() -> None:
    args = parse_args(
        "Draw validation losses over epochs (the paper's Figure 4) and over time, and the time "
        "saved over the decoder steps saved",
        "figures",
    )
    runs, series, results, notes = read_results(args)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from scripts.plot_batching import STYLE

    minutes = {name: mean(results, name, "minutes").mean for name in results}
    minutes = {name: value for name, value in minutes.items() if not math.isnan(value)}
    drawings = {
        "figure4": (4.8, lambda ax: draw_losses(ax, runs, series, FIGURE4)),
        "loss_over_time": (4.8, lambda ax: draw_losses(ax, runs, series, minutes, minutes)),
        "time_over_steps": (5.4, lambda ax: draw_savings(ax, results)),
    }
    problems = []
    for name, (height, draw) in drawings.items():
        path = args.output / f"{name}.png"
        try:
            if "times" in notes and name != "figure4":
                raise UserError(notes["times"])
            with rc_context(STYLE):
                figure = Figure(figsize=(9, height), layout="constrained")
                ax = figure.subplots()
                ax.grid(alpha=0.25)
                draw(ax)
                figure.savefig(path, dpi=160)
            print(f"wrote {path}")
        except UserError as error:  # something is still missing
            path.unlink(missing_ok=True)  # it would show other runs than the rest
            problems.append(f"{path}: {error}")
            print(f"not drawn: {path}: {error}")
    if len(problems) == len(drawings):
        raise UserError(problems[0])


if __name__ == "__main__":
    exit_on_user_error(main)
