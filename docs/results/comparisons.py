"""Prints the numbers of docs/results.md and docs/results/appendix.md from the records beside this
file, and draws their figures and that of docs/speech.md.

    python docs/results/comparisons.py

Losses compare by their ratios, in percent, with 95 % intervals for other seeds of the same corpus,
split and model.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import plot_batching
from scripts.plot_batching import COLOURS
from scripts.results import PAPER, markdown

FOLDER = Path(__file__).resolve().parent
CONCLUSIONS = {  # of the paper: what they compare, and the sign that it says the change has
    "1. SSB-BR is as good as": ("BKT-BR → SSB-BR, ATS-BR → SSB-BR", 0),
    "2. behind RAND": ("RAND → SSB-BR, RAND → BKT-BR, RAND → ATS-BR", 1),
    "3. ahead of RAND": ("RAND → SSB-DBS-BR", -1),
    "4. SSB is better": ("SB → SSB", -1),
    "5. BR is better": ("SB → SB-BR, SSB → SSB-BR, SSB-DBS → SSB-DBS-BR", -1),
    "5. DBS is better": ("SB → SB-DBS, SSB → SSB-DBS, SSB-BR → SSB-DBS-BR", -1),
    "sorted batches": ("RAND → SB, RAND → SSB, RAND → SB-DBS, RAND → SSB-DBS", 1),
}
SIMILAR = 2.0  # percent: as good as
SERIES = {  # that share a start: file, loss, and how the forest plot marks and calls them
    "voice": ("voice", "loss", "o", "a voice, from RAND's start"),
    "re-estimated": ("voice", "precise_loss", "s", "the same voice, re-estimated"),
    "synthetic": ("longest_first", "loss", "^", "synthetic, longest first"),
    "synthetic, re-estimated": ("longest_first", "precise_loss", "", ""),
    "synthetic, shortest first": ("shortest_first", "loss", "v", "synthetic, shortest first"),
}
PRIMARY = (  # the first three were fixed before the series same_time began
    ("RAND 40", "SSB-DBS-BR 40"),
    ("RAND 40", "SSB-DBS-BR 56"),
    ("SSB-BR 50", "SSB-DBS-BR 56"),
    ("RAND 40", "SSB-BR 50"),
)
MEASURES = {"hours": 2, "masked loss": 3, "MCD (dB)": 2}  # of same_time: the digits shown
MEASURES |= {"failures": 1, "words misheard %": 1, "opinion": 2}


# The series same_time


def read_arms(file: str) -> pd.DataFrame:
    """Reads records, whose arm is their experiment and its epochs."""
    records = pd.read_csv(FOLDER / file)
    epochs = records.part.str.removeprefix("epochs")
    return records.assign(arm=records.experiment + " " + epochs, epochs=epochs.astype(int))


def same_time() -> pd.DataFrame:
    """Returns the measures of each run that has ended, by arm and seed."""
    runs = read_arms("same_time.csv").groupby(["arm", "seed"])
    speech = read_arms("same_time_speech.csv").groupby(["arm", "seed"])
    heard = read_arms("same_time_heard.csv").set_index(["arm", "seed"])
    measures = {
        "hours": runs.processor_minutes.sum() / 60,
        "masked loss": runs.masked_loss.last(),
        "MCD (dB)": speech["MCD (dB)"].mean(),
        "failures": speech["any of these %"].mean(),
        "words misheard %": heard.misheard,
        "opinion": heard.opinion,
    }
    return pd.DataFrame(measures)[runs.epoch.max() == runs.epochs.first()]


def paired(before: pd.Series, after: pd.Series, ratio: bool) -> tuple[float, float, float]:
    """Returns the mean change over the seeds that both have, and its interval; in percent, if it is
    of the ratio."""
    changes = (np.log(after / before) if ratio else after - before).dropna()
    interval = stats.ttest_1samp(changes, 0).confidence_interval()
    values = np.array([changes.mean(), *interval])
    return tuple(100 * np.expm1(values) if ratio else values)


def primary(measures: pd.DataFrame) -> pd.DataFrame:
    """Returns the changes of each measure, paired by seed; of hours and losses in percent."""
    rows = []
    for before, after in PRIMARY:
        row = {"from → to": f"{before} → {after}"}
        for measure, digits in MEASURES.items():
            pair = (measures[measure].xs(arm, level="arm") for arm in (before, after))
            ratio = measure in ("hours", "masked loss")
            row[measure] = shown(*paired(*pair, ratio), digits=1 if ratio else digits)
        rows.append(row)
    return pd.DataFrame(rows)


def draw_same_time(ended: pd.Index, path: Path) -> None:
    """Draws each arm's masked loss over hours: the mean over the seeds, and each seed."""
    records = read_arms("same_time.csv").set_index(["arm", "seed"]).loc[ended]
    records["hours"] = records.groupby(["arm", "seed"]).processor_minutes.cumsum() / 60
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for colour, (arm, runs) in zip(COLOURS, records.dropna().groupby("arm"), strict=False):
        for _, run in runs.groupby("seed"):
            axes.plot(run.hours, run.masked_loss, color=colour, linewidth=0.5, alpha=0.6)
        mean = runs.groupby("epoch")[["hours", "masked_loss"]].mean()
        axes.plot(mean.hours, mean.masked_loss, color=colour, linewidth=2, label=f"{arm} epochs")
    axes.set(xlabel="hours of one core", ylabel="masked validation loss", ylim=(1.0, 2.0))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


def draw_reader(path: Path) -> None:
    """Draws how the voice of this repository is heard at some of its checkpoints, and its loss."""
    record = pd.read_csv(FOLDER / "reader.csv")
    heard = record.dropna(subset="misheard")
    figure = Figure(figsize=(7, 6), layout="constrained")
    loss, misheard, opinion = figure.subplots(3, sharex=True)
    loss.plot(record.epoch, record.masked_loss, color="black")
    misheard.errorbar(heard.epoch, heard.misheard, heard.misheard_error, fmt="o-")
    opinion.errorbar(heard.epoch, heard.opinion, heard.opinion_error, fmt="o-")
    loss.set(ylabel="masked validation loss")
    misheard.set(ylabel="words misheard, %")
    opinion.set(ylabel="predicted opinion", xlabel="epochs")
    for axes in (loss, misheard, opinion):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=160)


# Series whose seeds share a start


def final_logs(series: str, loss: str) -> pd.DataFrame:
    """Returns the logarithm of the mean of each run's last two validations (the paper's VL3): a row
    for each seed, a column for each experiment."""
    records = pd.read_csv(FOLDER / f"{series}.csv")
    last = records[records.part == "annealed"].groupby(["seed", "experiment"]).tail(2)
    return np.log(last.pivot_table(loss, "seed", "experiment"))


def change(
    logs: pd.DataFrame, before: str, after: str, n_joint: int = 1
) -> tuple[float, float, float]:
    """Returns the change between two experiments in percent and its interval; ``n_joint`` intervals
    hold at once (Bonferroni). nan where an experiment has no run.

    A log loss is an effect of the experiment and one of the seed, by least squares: every run
    counts, though not every experiment has every seed.
    """
    if not {before, after} <= set(logs):
        return np.nan, np.nan, np.nan
    runs = logs.stack().dropna()
    seeds, names = (pd.get_dummies(runs.index.get_level_values(i), dtype=float) for i in (0, 1))
    design = pd.concat([names, seeds.iloc[:, 1:]], axis=1)
    effects, squares, rank, _ = np.linalg.lstsq(design.to_numpy(), runs.to_numpy())
    weights = np.array([(name == after) - (name == before) for name in design], float)
    df = len(runs) - rank
    variance = squares[0] / df * weights @ np.linalg.inv(design.T @ design) @ weights
    half = stats.t.ppf(1 - 0.025 / n_joint, df) * np.sqrt(variance)
    return tuple(100 * np.expm1(weights @ effects + np.array([0, -half, half])))


def verdict(sign: int, low: float, high: float) -> str:
    """Says whether an interval of percents, as shown, is on the side of zero that the paper says;
    or, of "as good as" (0), within ``SIMILAR``."""
    low, high = round(low, 1), round(high, 1)
    if sign == 0:
        yes, no = max(-low, high) < SIMILAR, min(-low, high) < -SIMILAR
    else:
        low, high = sorted((sign * low, sign * high))
        yes, no = low > 0, high < 0
    return "yes" if yes else "no" if no else "undecided"


def all_comparisons() -> pd.DataFrame:
    """Returns a row for each comparison of the paper, with tuples of a change and its interval."""
    series = {name: final_logs(file, loss) for name, (file, loss, *_) in SERIES.items()}
    rows = []
    for conclusion, (pairs, sign) in CONCLUSIONS.items():
        for before, after in (pair.split(" → ") for pair in pairs.split(", ")):
            n_joint = 1 + pairs.count(",")
            paper = 100 * (PAPER.VL3[after] / PAPER.VL3[before] - 1)
            row = {"": conclusion, "from → to": f"{before} → {after}", "paper": (paper,)}
            row |= {name: change(logs, before, after, n_joint) for name, logs in series.items()}
            rows.append(row | {"on the voice": verdict(sign, *row["voice"][1:])})
    return pd.DataFrame(rows)


def draw_forest(losses: pd.Series, comparisons: pd.DataFrame, path: Path) -> None:
    """Draws all comparisons: ours with their intervals, the paper's without."""
    axes = (figure := Figure(figsize=(8, 7), layout="constrained")).subplots()

    def draw(y: Sequence[float], changes: Sequence, marker: str, colour: str, label: str) -> None:
        mean, low, high = np.transpose(list(changes))
        bars = (mean - low, high - mean)
        axes.errorbar(mean, y, xerr=bars, fmt=marker, color=colour, markersize=5, label=label)

    pairs = [[losses.xs(arm, level="arm") for arm in pair] for pair in PRIMARY]
    y = len(pairs) + np.arange(len(comparisons))
    ours = [paired(*pair, ratio=True) for pair in pairs]
    draw(range(len(pairs)), ours, "D", "black", "a voice, from nothing (same_time)")
    drawn = {name: style for name, (_, _, *style) in SERIES.items() if style[0]}
    offsets = np.linspace(-0.25, 0.25, len(drawn))
    for offset, colour, (name, style) in zip(offsets, COLOURS, drawn.items(), strict=False):
        draw(y + offset, comparisons[name], style[0], colour, style[1])
    paper = [paper for (paper,) in comparisons["paper"]]
    axes.plot(paper, y, "x", color="red", label="the paper (one seed)")
    axes.axvline(0, color="black", linewidth=1)
    axes.axhline(len(pairs) - 0.5, color="black", linewidth=0.5)
    labels = [f"{before} → {after} epochs" for before, after in PRIMARY]
    axes.set_yticks(range(len(pairs) + len(y)), [*labels, *comparisons["from → to"]])
    axes.invert_yaxis()
    axes.set(xlabel="change of the validation loss in %")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False, loc="center right", fontsize=8)
    figure.savefig(path, dpi=160)


# Printing


def shown(mean: float, low: float = np.nan, high: float = np.nan, digits: int = 1) -> str:
    if np.isnan(mean):
        return ""
    interval = "" if np.isnan(low) else f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"{mean:+.{digits}f}{interval}"


def print_table(title: str, rows: pd.DataFrame) -> None:
    cells = [
        [shown(*x) if isinstance(x, tuple) else str(x) for x in row] for row in rows.to_numpy()
    ]
    print(f"\n**{title}**\n\n{markdown([list(rows), *cells])}")


def main() -> None:
    plot_batching.main([])  # padding
    measures, comparisons = same_time(), all_comparisons()
    draw_same_time(measures.index, FOLDER / "same_time.png")
    draw_reader(FOLDER / "reader.png")
    draw_forest(measures["masked loss"], comparisons, FOLDER / "comparisons.png")
    listed = {
        name: measures[name].map(f"{{:.{n}f}}".format).groupby("arm").agg(", ".join)
        for name, n in MEASURES.items()
    }
    epochs = pd.read_csv(FOLDER / "predicted.csv").groupby("experiment").processor_minutes.median()
    print("\n**same_time:** an epoch's minutes,", epochs.round(2).to_dict())
    print("saved of RAND's, %:", (100 - 100 * epochs / epochs.RAND).round(1).to_dict())
    print_table("same_time: each seed's", pd.DataFrame(listed).reset_index())
    print_table("same_time: means", measures.groupby("arm").mean().round(2).reset_index())
    print_table("Kathleen's recordings", pd.read_csv(FOLDER / "heard.csv").head(1))
    print_table("same_time: paired by seed; hours and loss in %", primary(measures))
    logs = final_logs("voice", "loss")
    spread = logs.drop(columns="RAND").sub(logs.RAND, axis=0).var().mean() ** 0.5
    print(f"\nA change of one seed, on the voice: ±{196 * spread:.1f} points")
    batches = pd.read_csv(FOLDER / "voice.csv").groupby("experiment").n_batches.mean()
    print("Batches an epoch, on the voice:", batches.round(1).to_dict())
    print_table("The paper's comparisons: VL3 in %, intervals jointly", comparisons)


if __name__ == "__main__":
    main()
