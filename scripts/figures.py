"""Draw the paper's Figure 4 and three figures that it lacks, from what runs of train.py recorded.

    python scripts/figures.py runs/table2                      # the output of run_all.sh
    python scripts/figures.py runs/sweep_batch_size --sweep batch_size

figure4.png: validation loss over epochs. loss_over_time.png: the same over training time.
time_over_steps.png: time saved against RAND, over decoder steps saved. comparisons.png: how losses
differ, with intervals. plot_batching.py draws Figures 1-3. With --sweep, there is one figure,
sweep.png: loss over epochs, over steps and over time.
"""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import UserError, exit_on_user_error
from scripts.paper import COMPARISONS, EXPERIMENTS, PAPER, SIMILAR
from scripts.runs import LEAST_VALIDATIONS, RESOURCES, Results, parse_args, smoothed
from scripts.tables import THEIRS, WANTED, Evidence, compared

# A colour of Okabe and Ito's for each strategy; marker and line tell which operations are on.
COLOURS = {"RAND": "#000000", "SB": "#D55E00", "SSB": "#0072B2", "BKT": "#009E73", "ATS": "#CC79A7"}
FORMATS = {"": "o-", "BR": "s--", "DBS": "^-.", "DBS-BR": "D:"}
MARKERS = dict(zip(COLOURS, "osD^v", strict=True))  # where colours tell values
FIGURE4 = [name for name in EXPERIMENTS if not name.startswith(("BKT", "ATS"))]  # the paper's
LEGEND = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False, "handlelength": 3}


def style(experiment: str) -> dict[str, Any]:
    strategy, _, operations = experiment.partition("-")
    colour, form = COLOURS.get(strategy, "#777777"), FORMATS[operations]
    return {"label": experiment, "color": colour, "marker": form[0], "linestyle": form[1:]}


def furthest(results: Results, experiment: str, loss: str = "loss") -> list[list[float]]:
    """An experiment's losses, without the seeds that have not come as far as others."""
    curves = [r.losses(results.epochs, loss) for r in results.runs if r.experiment == experiment]
    longest = max(map(len, curves), default=0)
    return [curve for curve in curves if len(curve) == longest > 0]


def draw_curves(ax: Any, x: Any, curves: Any, form: dict[str, Any]) -> None:
    """The mean of several seeds' losses, and their range."""
    y = np.array(curves)
    ax.plot(x, y.mean(0), markersize=4, **form)
    ax.fill_between(x, y.min(0), y.max(0), alpha=0.12, lw=0, color=form["color"])


def draw_losses(ax: Any, results: Results, over_time: bool = False) -> None:
    """Validation losses over epochs, or over time."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    epochs, xlabel, scale = results.epochs, "epochs", dict.fromkeys(FIGURE4, 1.0)
    if over_time:
        times = {name: results.mean(name, "minutes")[0] for name in results.values}
        times = {name: minutes for name, minutes in times.items() if minutes > 0}  # not nan
        hours = epochs[-1] * max(times.values(), default=0) > 120
        scale = {name: minutes / (60 if hours else 1) for name, minutes in times.items()}
        xlabel = f"training time ({'hours' if hours else 'minutes'})"
    curves = {name: losses for name in scale if (losses := furthest(results, name))}
    if not curves:
        raise UserError("no run has a validation yet; wait for the first")
    smooth = min(len(losses[0]) for losses in curves.values()) >= LEAST_VALIDATIONS
    first = 0 if results.start else 0.2 * epochs[-1]
    skipped = sum(epoch < first for epoch in epochs)  # so steep that it hides the rest
    for name, losses in curves.items():
        start, end = min(skipped, len(losses[0]) - 1), len(losses[0])
        x = [epoch * scale[name] for epoch in epochs[start:end]]
        y = [(smoothed(curve) if smooth else curve)[start:] for curve in losses]
        draw_curves(ax, x, y, style(name))
    unsmoothed = f"\nnot smoothed: a run has fewer than {LEAST_VALIDATIONS} validations"
    ylabel = f"validation loss (RAND batches){', smoothed' if smooth else unsmoothed}"
    ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log")  # separates small losses
    ax.yaxis.set_major_locator(MaxNLocator(8))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    if not over_time:
        ax.xaxis.get_major_locator().set_params(integer=True)
    lines = sorted(ax.lines, key=lambda line: -line.get_ydata()[-1])
    ax.legend(handles=lines, title="shaded: range over seeds", **LEGEND)


def draw_sweep(axes: Any, results: Results) -> None:
    """Masked losses over epochs, over steps and over time: a colour for each value of the swept
    setting, a marker for each strategy, and broken lines for dynamic batches."""
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator

    runs = {run.experiment: run for run in results.runs}
    values = sorted({run.settings[results.sweep] for run in results.runs})
    for ax, (unit, resource) in zip(axes, RESOURCES.items(), strict=True):
        for name, run in runs.items():
            curves, x = furthest(results, name, "masked_loss"), results.taken(name, resource)
            if curves and x[0] > 0:  # not nan, as times that are not compared
                shade = 0.9 * values.index(run.settings[results.sweep]) / len(values)
                form = {"label": name.replace(",", ", "), "color": colormaps["viridis"](shade)}
                form["linestyle"] = "--" if run.settings["dynamic_batch_size"] else "-"
                form["marker"] = MARKERS[run.settings["batching_strategy"]]
                draw_curves(ax, x[: len(curves[0])], curves, form)
        ax.set(xlabel=unit, xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set(major_formatter="{x:g}", minor_formatter="")
    if not axes[0].lines:
        raise UserError("no run has a validation yet; wait for the first")
    axes[0].set_ylabel("masked validation loss; shaded: range over seeds")
    axes[2].set_title("times are not compared" * ("times" in results.notes), fontsize=9)
    labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(*labels, loc="outside lower center", ncols=4, frameon=False)


def draw_savings(ax: Any, results: Results) -> None:
    """Time saved against RAND over decoder steps saved: on the line, the steps explain it all."""
    # With batches of a fixed size, the paper's steps are in proportion to the batch length.
    rows = [row for name, row in PAPER.items() if name != "RAND" and "DBS" not in name]
    x = [100 * (1 - row["abl"] / PAPER["RAND"]["abl"]) for row in rows]
    y = [100 * (1 - row["minutes"] / PAPER["RAND"]["minutes"]) for row in rows]
    label = f"the paper's {len(rows)} of a fixed batch size"
    ax.plot(x, y, "o", mfc="none", color="#888888", label=label, markersize=5)
    for name in results.values:
        steps, _ = results.reduction(name, "total_length")
        time, error = results.reduction(name, "minutes")
        if name != "RAND" and not math.isnan(steps + time):
            x.append(steps)
            ax.errorbar(steps, time, error, capsize=3, **style(name))
    if len(x) == len(rows):
        raise UserError("needs an epoch of RAND and of another experiment")
    ends = [min(x) - 4, max(x) + 4]
    ax.plot(ends, ends, color="#888888", linewidth=1, label="time follows the steps")
    xlabel = "decoder steps saved against RAND (%): sum of batch lengths"
    ax.set(xlim=ends, xlabel=xlabel, ylabel="training time saved against RAND (%)")
    ax.legend(**LEGEND)


def draw_comparisons(ax: Any, results: Results) -> None:
    """How the loss changes from RAND to each experiment, and in the comparisons of Table 4."""
    pairs = [f"RAND → {name}" for name in EXPERIMENTS[1:]]
    pairs += [pair for some in COMPARISONS.values() for pair in some]
    rows, evidence = np.arange(len(pairs)), compared(results)
    ax.axvspan(*WANTED[SIMILAR], color="#888888", alpha=0.15, lw=0, label=SIMILAR)
    drawn = False
    for i, (name, ours) in enumerate(evidence.items()):
        change, low, high = np.array([ours.contrast(pair) for pair in pairs]).T
        y = rows + 0.3 * (i - (len(evidence) - 1) / 2)
        form = {"color": ("#0072B2", "#D55E00")[i], "markersize": 4, "label": name}
        ax.errorbar(change, y, xerr=[change - low, high - change], fmt="os"[i], lw=1.2, **form)
        drawn |= not np.isnan(change).all()
    if not drawn:
        raise UserError(f"needs two runs of one seed with {LEAST_VALIDATIONS} validations or more")
    theirs = Evidence(THEIRS, results.judged("vl"))
    changes = [theirs.contrast(pair)[0] for pair in pairs]
    ax.plot(changes, rows, "x", color="#888888", markersize=5, label="the paper's")
    ax.axvline(0, color="#888888", lw=0.8)
    ax.axhline(len(EXPERIMENTS) - 1.5, color="#888888", lw=0.8)
    ax.set(yticks=rows, yticklabels=pairs, xlabel="change of the loss (%), with 95 % intervals")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(**LEGEND)


def main() -> None:
    what = "Draw validation losses over epochs (the paper's Figure 4) and over time, how they "
    what += "differ, and the time saved over the decoder steps saved"
    results, output = parse_args(what, "figures")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from scripts.plot_batching import STYLE

    draw_over_time = partial(draw_losses, over_time=True)
    timed = {"time_over_steps": draw_savings, "loss_over_time": draw_over_time}
    drawings = {"figure4": draw_losses, "comparisons": draw_comparisons} | timed
    if results.sweep:
        drawings = {"sweep": draw_sweep}
    problems = []
    for name, draw in drawings.items():
        path = output / f"{name}.png"
        path.unlink(missing_ok=True)  # it may show other runs
        try:
            if "times" in results.notes and name in timed:
                raise UserError(results.notes["times"])
            with rc_context(STYLE | {"axes.grid": True, "grid.alpha": 0.25}):
                figure = Figure(figsize=(9, 4.8), layout="constrained")
                panels = figure.subplots(1, 3, sharey=True) if results.sweep else figure.subplots()
                draw(panels, results)
                figure.savefig(path, dpi=160)
            print(f"wrote {path}")
        except UserError as error:  # something is still missing
            problems.append(f"{path}: {error}")
            print(f"not drawn: {problems[-1]}")
    if len(problems) == len(drawings):
        raise UserError(problems[0])


if __name__ == "__main__":
    exit_on_user_error(main)
