"""Draw the paper's Figure 4 and two figures that it lacks, from what runs of train.py recorded.

    python scripts/figures.py runs/table2                      # the output of run_all.sh

figure4.png: validation loss over epochs. loss_over_time.png: the same over training time.
time_over_steps.png: time saved against RAND, over decoder steps saved. Figures 1-3 are
plot_batching.py's.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import UserError, exit_on_user_error
from scripts.paper import EXPERIMENTS, PAPER
from scripts.plot_batching import STYLE
from scripts.tables import (
    LEAST_VALIDATIONS,
    Figures,
    Run,
    Series,
    losses_of,
    mean_of,
    parse_args,
    read_series,
    reduction,
    smoothed,
    values_of,
)

# A colour a strategy, of Okabe and Ito's; the line says which operations are on.
COLOURS = {"RAND": "#000000", "SB": "#D55E00", "SSB": "#0072B2", "BKT": "#009E73", "ATS": "#CC79A7"}
LINES = {"": ":", "BR": "--", "DBS": "-.", "DBS-BR": "-"}
LINE_NOTE = "dotted: neither DBS nor BR   dashed: BR   dash-dotted: DBS   solid: both, and RAND   "
LINE_NOTE += "shaded: range over seeds"
FIGURE4 = [name for name in EXPERIMENTS if not name.startswith(("BKT", "ATS"))]  # the paper's


def style(experiment: str) -> dict[str, object]:
    strategy, _, operations = experiment.partition("-")
    line = "-" if experiment == "RAND" else LINES[operations]
    return {"color": COLOURS.get(strategy, "#777777"), "linestyle": line, "linewidth": 1.8}


def label_ends(ax: Axes, ends: Iterable[tuple[str, float, float]], gap: float = 0.045) -> None:
    """Each point's name at the right of the axes, at its height, moved apart to be legible."""
    ends = sorted(ends, key=lambda end: end[2])
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = np.array([to_axes.transform((x, y))[1] for _, x, y in ends])
    places = heights.copy()
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places -= (places - heights).mean()  # half of what was pushed up goes down
    places += max(-places[0], 0) - max(places[-1] - 1, 0)
    for (experiment, x, y), place in zip(ends, places, strict=True):
        ax.annotate(
            experiment, (x, y), (1.02, place), textcoords="axes fraction", va="center",
            color=style(experiment)["color"], fontsize=9, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": "#999999", "lw": 0.7, "linestyle": ":", "shrinkA": 1,
                "shrinkB": 4, "relpos": (0, 0.5),
            },
        )  # fmt: skip


def draw_losses(
    path: Path,
    runs: Sequence[Run],
    series: Series,
    experiments: Iterable[str],
    seconds: dict[str, float] | None = None,
) -> None:
    """Validation losses, mean over seeds with their range, over epochs; smoothed if none is short.

    With ``seconds`` an epoch of each experiment, over training time instead.
    """
    curves = {}
    for experiment in experiments:
        losses = [losses_of(r, series) for r in runs if r.experiment == experiment]
        if n := max(map(len, losses), default=0):  # of those seeds that have come furthest
            curves[experiment] = [curve for curve in losses if len(curve) == n]
    if not curves:
        raise UserError(f"{path}: no run has been validated yet; let them go on")
    smooth = min(len(losses[0]) for losses in curves.values()) >= LEAST_VALIDATIONS
    curves = {
        name: np.array([smoothed(curve) if smooth else curve for curve in losses])
        for name, losses in curves.items()
    }
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    ax = figure.subplots()
    # The steep start would hide what the strategies differ in.
    start = next((i for i, e in enumerate(series.epochs) if e >= 0.2 * series.planned), 0)
    longest = max(seconds[name] for name in curves) * series.planned if seconds else 0.0
    unit, per_unit = next(
        (u for u in (("days", 86400), ("hours", 3600), ("minutes", 60)) if longest > 2 * u[1]),
        ("seconds", 1),
    )
    ends = []
    for experiment, losses in curves.items():
        x = np.array(series.epochs[: losses.shape[1]], dtype=float)
        if seconds:
            x *= seconds[experiment] / per_unit
        part = slice(min(start, len(x) - 1), None)
        middle = losses.mean(0)
        marker = "o" if len(x[part]) == 1 else None
        ax.plot(x[part], middle[part], marker=marker, **style(experiment))
        if len(losses) > 1:
            ax.fill_between(
                x[part], losses.min(0)[part], losses.max(0)[part], alpha=0.12, linewidth=0,
                color=style(experiment)["color"],
            )  # fmt: skip
        ends.append((experiment, x[-1], middle[-1]))
    ax.set_xlabel(f"training time ({unit})" if seconds else "epochs")
    unsmoothed = f"\nnot smoothed: a run has fewer than {LEAST_VALIDATIONS} validations"
    ax.set_ylabel(f"validation loss (RAND batches){', smoothed' if smooth else unsmoothed}")
    ax.set_title(LINE_NOTE, loc="left", fontsize=8, color="#555555")
    ax.grid(alpha=0.25)
    ax.set_yscale("log")  # the strategies part where losses are small
    ax.yaxis.set_major_locator(MaxNLocator(8))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    label_ends(ax, ends)
    figure.savefig(path, dpi=160)


def draw_savings(path: Path, figures: Figures) -> None:
    """Time saved against RAND over decoder steps saved: on the line, the steps explain it all."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    ax = figure.subplots()
    # The paper's batches of a fixed size: steps are in proportion to the average batch length.
    random, points, theirs = PAPER["RAND"], [], []
    for experiment, row in PAPER.items():
        if experiment != "RAND" and "DBS" not in experiment:
            theirs.append([100 * (1 - row[name] / random[name]) for name in ("abl", "minutes")])
    for experiment in figures:
        steps, time = (reduction(figures, experiment, n) for n in ("total_length", "minutes"))
        if experiment != "RAND" and steps and time:
            points.append((experiment, steps[0], time[0]))
            spread = 0 if np.isnan(time[1]) else time[1]
            colour = style(experiment)["color"]
            ax.errorbar(steps[0], time[0], spread, fmt="o", color=colour, capsize=3, markersize=6)
    if not points:
        raise UserError(f"{path}: needs an epoch of RAND and of another experiment, by one seed")
    label = f"the paper's {len(theirs)} of a fixed batch size"
    ax.plot(*zip(*theirs, strict=True), "o", mfc="none", color="#888888", label=label, markersize=5)
    steps = [x for _, x, _ in points] + [x for x, _ in theirs]
    low, high = min(steps) - 4, max(steps) + 4
    ax.plot([low, high], [low, high], color="#888888", linewidth=1, label="time follows the steps")
    ax.set_xlim(low, high)
    ax.set_xlabel("decoder steps saved against RAND (%): sum of batch lengths")
    ax.set_ylabel("training time saved against RAND (%)")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, loc="upper left")
    label_ends(ax, points)
    figure.savefig(path, dpi=160)


def main() -> None:
    args = parse_args(
        "Draw validation losses over epochs (the paper's Figure 4) and over time, and the time "
        "saved over the decoder steps saved",
        "figures",
    )
    runs, series, figures, notes = read_series(args)
    output = args.output
    minutes = {name: mean_of(values_of(figures, name, "minutes")) for name in figures}
    seconds = {name: 60 * value[0] for name, value in minutes.items() if value}
    drawings = {
        "figure4": lambda path: draw_losses(path, runs, series, FIGURE4),
        "loss_over_time": lambda path: draw_losses(path, runs, series, seconds, seconds),
        "time_over_steps": lambda path: draw_savings(path, figures),
    }
    reasons = []
    with rc_context(STYLE):
        for name, draw in drawings.items():
            try:
                if "times" in notes and name != "figure4":
                    raise UserError(f"{output / name}.png: {notes['times']}")
                draw(output / f"{name}.png")
                print(f"wrote {output / name}.png")
            except UserError as error:  # there is not enough yet
                reasons.append(error)
                print(f"not drawn: {error}")
    if len(reasons) == len(drawings):
        raise reasons[0]


if __name__ == "__main__":
    exit_on_user_error(main)
