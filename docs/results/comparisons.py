"""Prints the tables of docs/results.md from the records beside this file, and its figures.

    python docs/results/comparisons.py

All runs of a seed share their start, so the logarithm of a loss is an effect of the experiment,
plus one of the seed, plus a residual: a block design, which least squares fits to all runs of a
series. Intervals of 95 % hold for other seeds of the same corpus, split and model.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.results import PAPER, Comparison, draw_figure4, markdown, paper_tables, staged

FOLDER = Path(__file__).resolve().parent
# Epochs on the voice: of RAND before the ten experiments, of each part of them, and of each part of
# SSB-DBS-BR in RAND's time
START, PART, MORE = 4, 6, 9
LOSSES = {"as validated": "loss", "re-estimated": "precise_loss"}
SIMILAR = 2.0  # percent


class Claim(NamedTuple):
    """A conclusion of the paper: comparisons that should all turn out as the paper says."""

    text: str
    comparisons: str
    says: str  # "paper's": as in its Table 2, by VL3; "similar"; or "lower"


IN_TIME = "RAND in SSB-BR's time → SSB-BR, RAND in BKT-BR's time → BKT-BR"
IN_TIME += ", RAND in ATS-BR's time → ATS-BR"
CLAIMS = (  # those without a star were fixed, with the rule, before the voice's runs had ended
    Claim(
        "1. SSB-BR does as well as BKT-BR and ATS-BR", "BKT-BR → SSB-BR, ATS-BR → SSB-BR", "similar"
    ),
    Claim(
        "2. SSB-BR, BKT-BR and ATS-BR are behind RAND after the same epochs",
        "RAND → SSB-BR, RAND → BKT-BR, RAND → ATS-BR",
        "paper's",
    ),
    Claim("2. but can be ahead of it after the same time", IN_TIME, "lower"),
    Claim("3. SSB-DBS-BR is ahead of RAND after the same epochs", "RAND → SSB-DBS-BR", "paper's"),
    Claim("4. SSB is better than SB, without DBS and BR", "SB → SSB", "paper's"),
    Claim(
        "5. BR lowers the loss",
        "SB → SB-BR, SSB → SSB-BR, SSB-DBS → SSB-DBS-BR",
        "paper's",
    ),
    Claim("5. DBS lowers the loss", "SB → SB-DBS, SSB → SSB-DBS, SSB-BR → SSB-DBS-BR", "paper's"),
    Claim(
        "4, 5. of SSB, BR and DBS, each does less where another is in use *",
        "SB-BR → SSB-BR less SB → SSB, SB-DBS → SSB-DBS less SB → SSB, "
        "SSB-DBS → SSB-DBS-BR less SSB → SSB-BR",
        "paper's",
    ),
)
SERIES = {  # of synthetic speech: records and part, the last two validations of which are compared
    "longest first": "longest_first/annealed",
    "shortest first": "shortest_first/annealed",
}


# Records


def read(series: str) -> pd.DataFrame:
    """Reads the records of a series, "FILE" or "FILE/PART"."""
    name, _, part = series.partition("/")
    records = pd.read_csv(FOLDER / f"{name}.csv")
    return records[records.part == part] if part else records


def final_logs(series: str, loss: str) -> pd.DataFrame:
    """Returns the logarithm of each run's final loss: a row for each seed, a column for each
    experiment. It is the paper's VL3: the mean of the last two validations."""
    return np.log(last_two(read(series).assign(run=lambda x: x.experiment), loss))


def last_two(records: pd.DataFrame, loss: str) -> pd.DataFrame:
    """Returns the mean of the last two validations: a row for each seed, a column for each run."""
    return records.groupby(["seed", "run"]).tail(2).pivot_table(loss, "seed", "run")


def random_within(series: str, loss: str, experiment: str) -> pd.Series:
    """Returns RAND's log loss of each seed after the time that another experiment takes for all
    its epochs, interpolated between validations."""
    records = read(series)
    share = 1 - saved_time("processor_minutes")[experiment].mean() / 100
    random = records[records.experiment == "RAND"].pivot(index="epoch", columns="seed", values=loss)
    epochs = random.index.to_numpy()
    start = 2 * epochs[0] - epochs[1]  # the validations are equally far apart
    points = start + share * (epochs - start)
    within = random.apply(lambda losses: np.interp(points, epochs, losses))
    return np.log(within.tail(2).mean())


def saved_time(quantity: str) -> pd.DataFrame:
    """Returns how much less than RAND's the minutes of an epoch on the voice are, in percent: a
    row for each round, a column for each experiment."""
    minutes = read("times").pivot(index="part", columns="experiment", values=quantity)
    return 100 * (1 - minutes.div(minutes.RAND, axis=0))


# Statistics


class Effects:
    """Log losses as effects of the experiment and of the seed, by least squares: every run counts,
    though not every experiment has every seed.

    Args:
        logs: a row for each seed, a column for each experiment, nan where there is no run.
    """

    def __init__(self, logs: pd.DataFrame) -> None:
        runs = logs.unstack().dropna()  # by experiment and seed
        labels = runs.index.to_frame(index=False).astype(str)
        design = pd.get_dummies(labels, prefix=["", "seed "], prefix_sep="", dtype=float)
        self.normal = design.T @ design
        inverse = np.linalg.pinv(self.normal)
        effects = inverse @ design.T.to_numpy() @ runs.to_numpy()
        self.effects = pd.Series(effects, design.columns)
        self.covariance = pd.DataFrame(inverse, design.columns, design.columns)
        self.df = len(runs) - int(np.linalg.matrix_rank(design))  # degrees of freedom
        squares = np.square(runs.to_numpy() - design.to_numpy() @ effects).sum()
        self.sd = float(np.sqrt(squares / max(self.df, 1)))  # of the residuals

    def change(self, weights: pd.Series, n_joint: int = 1) -> list[float]:
        """Returns the change that ``weights`` of experiments stand for, in percent, and the ends of
        its 95 % interval. ``n_joint`` intervals hold at once (Bonferroni). The ends are nan with
        fewer than four degrees of freedom; all is nan where an experiment has no run, or no chain
        of seeds leads from one to the other."""
        if not set(weights.index) <= set(self.effects.index):
            return [np.nan] * 3
        row = weights.reindex(self.effects.index, fill_value=0.0)
        if not np.allclose(row @ self.covariance @ self.normal, row):
            return [np.nan] * 3
        difference = weights @ self.effects[weights.index]
        half = np.nan
        if self.df >= 4:
            variance = weights @ self.covariance.loc[weights.index, weights.index] @ weights
            half = t.ppf(1 - 0.025 / n_joint, self.df) * self.sd * np.sqrt(variance)
        return [100 * np.expm1(difference + x) for x in (0, -half, half)]


def weights_of(comparison: str) -> pd.Series:
    """Returns the weight of each experiment's log loss in "BEFORE → AFTER", or in one such change
    less another one: "SB-BR → SSB-BR less SB → SSB"."""
    weights: dict[str, float] = {}
    for sign, change in zip((1, -1), comparison.split(" less "), strict=False):
        before, after = change.split(" → ")
        for experiment, weight in ((before, -sign), (after, sign)):
            weights[experiment] = weights.get(experiment, 0) + weight
    return pd.Series(weights)


def compared(series: str, loss: str, comparison: str, n_joint: int = 1) -> list[float]:
    """Returns the change and its interval of a comparison (see :func:`weights_of`); nan where a run
    is missing. BEFORE may be "RAND in AFTER's time", which is read off the curves halfway, with one
    learning rate."""
    before, _, after = comparison.partition(" → ")
    if "time" not in before:
        return Effects(final_logs(series, loss)).change(weights_of(comparison), n_joint)
    if not series.startswith("voice"):
        return [np.nan] * 3
    series = series.replace("annealed", "common")
    logs = final_logs(series, loss).assign(RAND=random_within(series, loss, after))
    return Effects(logs).change(weights_of(f"RAND → {after}"), n_joint)


def paper_change(comparison: str) -> float:
    weights = weights_of(comparison)
    if not set(weights.index) <= set(PAPER.index):
        return np.nan
    return 100 * np.expm1(weights @ np.log(PAPER.VL3[weights.index]))


def verdict(says: str, paper: float, low: float, high: float) -> str:
    """Judges one comparison by its interval."""
    if says == "similar":
        holds = low > -SIMILAR and high < SIMILAR
        fails = low > SIMILAR or high < -SIMILAR
    else:
        sign = -1 if says == "lower" else np.sign(paper)
        low, high = sorted((sign * low, sign * high))
        holds = low > 0  # whatever its size
        fails = not holds and high < (0 if says == "lower" else abs(paper))
    if holds:
        return "reproduced"
    return "not reproduced at this scale" if fails else "undecided"


# Tables


def shown(change: float, low: float = np.nan, high: float = np.nan, digits: int = 1) -> str:
    if np.isnan(change):
        return ""
    change, low, high = (f"{value:+.{digits}f}" for value in (change, low, high))
    return change + ("" if "nan" in low else f" ({low} to {high})")


def print_table(title: str, rows: list[dict[str, object]]) -> None:
    lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    print(f"\n**{title}**\n\n{markdown(lines)}")


def claims() -> list[dict[str, str]]:
    """Returns a row for each comparison. The verdicts are on the voice, as validated; intervals
    hold jointly for all comparisons of a conclusion."""
    rows = []
    for claim in CLAIMS:
        pairs = claim.comparisons.split(", ")
        for i, pair in enumerate(pairs):
            paper, n = paper_change(pair), len(pairs)
            voice, again = (compared("voice/annealed", x, pair, n) for x in LOSSES.values())
            # Of BKT and ATS, synthetic speech has only the older records.
            synthetic = compared("longest_first/annealed", "loss", pair, n)
            if "BKT" in pair or "ATS" in pair:
                synthetic = compared("shortest_first/annealed", "loss", pair, n)
            row = {"the paper concludes": claim.text * (i == 0), "from → to": pair}
            row |= {"paper": shown(paper), "voice": shown(*voice), "re-estimated": shown(*again)}
            row |= {"synthetic speech": shown(*synthetic)}
            rows.append(row | {"verdict": verdict(claim.says, paper, *voice[1:])})
    return rows


def from_random(loss: str) -> list[dict[str, str]]:
    """Returns the change from RAND to each experiment in every series, each with its own interval
    where there are seeds enough."""
    rows = []
    for name in PAPER.index[1:]:
        pair = f"RAND → {name}"
        row = {"RAND → …, %": name, "paper": shown(paper_change(pair))}
        rows.append(row | {k: shown(*compared(v, loss, pair)) for k, v in SERIES.items()})
    return rows


def voice_runs() -> list[SimpleNamespace]:
    """Returns the runs on the voice, both parts of each as one. Not every experiment has every
    seed, and seeds differ more than experiments do. So the losses are RAND's mean over its seeds,
    times their ratio to RAND's of the same seed and epoch; but RAND's own are as they are."""
    records = read("voice")
    records = records[records.part.isin(["common", "annealed"])]
    random = records[records.experiment == "RAND"].pivot(
        index="epoch", columns="seed", values="loss"
    )
    runs = []
    for (name, seed), run in records.groupby(["experiment", "seed"]):
        run = run.set_index("epoch").sort_index()
        if name != "RAND":
            run["loss"] *= random.mean(axis=1) / random[seed]
        runs.append(SimpleNamespace(name=name, seed=seed, validations=run))
    return runs


def voice_table2(runs: list[SimpleNamespace]) -> str:
    """Returns the paper's Table 2. What its Table 4 has is in :func:`claims`."""
    rows = []
    for run in runs:
        losses, batches = run.validations.loss, run.validations[["zpr", "abl", "total_length"]]
        row = {"experiment": run.name} | batches.mean().to_dict()
        row["zpr"] *= 100
        rows.append(row | staged(losses, list(losses.index), START))
    groups = pd.DataFrame(rows).groupby("experiment")
    order = [name for name in PAPER.index if name in groups.groups]
    mean, error, seeds = (
        table.loc[order] for table in (groups.mean(), groups.sem(), groups.size())
    )
    times = read("times").groupby("experiment").processor_minutes
    mean["minutes"], error["minutes"] = times.mean(), times.sem()
    labels = pd.DataFrame({"batching": order, "seeds": seeds.to_numpy(), "epochs": ""})
    return paper_tables(Comparison(labels, mean.reset_index(), error.reset_index(), []))["table2"]


def more_epochs() -> list[dict[str, str]]:
    """Returns the change on the voice from RAND's loss to that of SSB-DBS-BR after more epochs, and
    its share of RAND's time in percent, with 95 % intervals."""
    row = {}
    for title, loss in LOSSES.items():
        longer = final_logs("more_epochs/annealed", loss)["SSB-DBS-BR"]
        logs = final_logs("voice/annealed", loss).assign(longer=longer)
        row[title] = shown(*Effects(logs).change(weights_of("RAND → longer")))
    share = MORE / PART * (100 - saved_time("processor_minutes")["SSB-DBS-BR"])
    half = t.ppf(0.975, len(share) - 1) * share.sem()
    time = f"{share.mean():.1f} ({share.mean() - half:.1f} to {share.mean() + half:.1f})"
    return [row | {"time over RAND's %": time}]


def studies(same: bool = False) -> dict[str, dict[str, list[float]]]:
    """Returns, of runs with other settings on synthetic speech, how their masked losses differ from
    RAND's at its usual learning rate; or, of SSB-DBS-BR, from RAND's with the ``same`` setting. The
    keys are the run, "EXPERIMENT, SERIES", and when: after equal epochs, or halfway after equal
    times, which are the processor's of the run that takes least. Each has its own interval."""
    records = read("studies")
    records["run"] = records.experiment + ", " + records.series
    losses = {"after all epochs": last_two(records[records.part == "annealed"], "masked_loss")}
    records = records[records.part == "common"]
    losses["halfway, equal epochs"] = last_two(records, "masked_loss")
    minutes = records.groupby("run").processor_minutes.mean()
    epochs = records.groupby("run").epoch.agg(lambda x: x.max() - x.min() + x.diff().median())
    least, start = (minutes * epochs).min(), records.epoch.max() - epochs.max()
    at_least = {
        key: np.interp(
            start + least / minutes[key[1]], run.epoch, run.masked_loss.rolling(2, 1).mean()
        )
        for key, run in records.groupby(["seed", "run"])
    }
    losses["halfway, equal time"] = pd.Series(at_least).unstack()
    changes: dict[str, dict[str, list[float]]] = {}
    for when, table in losses.items():
        effects = Effects(np.log(table))
        for run in table:
            base = run.replace("SSB-DBS-BR", "RAND") if same else "RAND, rates_1"
            if base in table and run != base:
                changed = effects.change(weights_of(f"{base} → {run}"))
                changes.setdefault(run, {})[when] = changed
    return changes


def studies_table(same: bool) -> list[dict[str, str]]:
    """Returns :func:`studies`' changes, with each run's epochs of the first part."""
    records, rows = read("studies"), []
    records = records[records.part == "common"].groupby(["experiment", "series"])
    epochs = records[["processor_minutes", "n_batches"]].mean()
    for run, changes in studies(same).items():
        minutes, batches = epochs.loc[tuple(run.split(", "))]
        row = {"run": run, "min/epoch": f"{minutes:.3f}", "batches/epoch": f"{batches:.0f}"}
        rows.append(row | {when: shown(*interval) for when, interval in changes.items()})
    return rows


def draw_lrf(path: Path) -> None:
    """Draws how SSB-DBS-BR's loss differs from RAND's against SSB's LRF."""
    from matplotlib.figure import Figure

    changes = studies()
    factors = {lrf: f"SSB-DBS-BR, lrf_{lrf}" for lrf in ("0", "0.05", "0.1", "0.2", "0.5", "1000")}
    factors["0.1"] = "SSB-DBS-BR, rates_1"
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for i, when in enumerate(changes[factors["0.1"]]):
        mean, low, high = np.transpose([changes[run][when] for run in factors.values()])
        places = np.arange(len(factors)) + 0.1 * (i - 1)
        axes.errorbar(places, mean, (mean - low, high - mean), fmt="o-", capsize=3, label=when)
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xticks(range(len(factors)), factors)
    axes.set(xlabel="LRF", ylabel="masked loss, change from RAND's in %")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=160)


def table3() -> list[dict[str, str]]:
    """Returns the paper's Table 3 on the voice: means over rounds, and their standard errors."""
    saved = {"wall clock": saved_time("minutes"), "processor": saved_time("processor_minutes")}
    means = read("times").groupby("experiment")[["total_length", "zpr"]].mean()
    steps, frames = means.total_length, 1 / (1 - means.zpr)  # padded frames over true ones
    rows = []
    for name in PAPER.index[1:]:
        paper = 1 - PAPER.minutes[name] / PAPER.minutes["RAND"]
        row = {"From RAND to": name, "paper %": f"{100 * paper:.1f}"}
        for clock, rounds in saved.items():
            row[f"{clock} %"] = f"{rounds[name].mean():.1f} ± {rounds[name].sem():.1f}"
        row["fewer decoder steps %"] = f"{100 * (1 - steps[name] / steps['RAND']):.1f}"
        row["fewer padded frames %"] = f"{100 * (1 - frames[name] / frames['RAND']):.1f}"
        rows.append(row)
    return rows


def speech() -> list[dict[str, str]]:
    """Returns how far evaluate.py finds SSB-DBS-BR's speech from RAND's of the same seeds: failures
    of 100 sentences, and MCD, with 95 % intervals."""
    records = pd.read_csv(FOLDER / "voice_speech.csv")
    parts = records.checkpoint.str.extract(r"runs/(\w+)/annealed/([\w-]+)/seed(\d+)/")
    records = records.assign(run=parts[0] + "/" + parts[1], seed=parts[2])
    rows = []
    for run in ("voice/SSB-DBS-BR", "more_epochs/SSB-DBS-BR"):
        row = {"": run}
        for column in ("any of these %", "MCD (dB)"):
            values = records.pivot(index="seed", columns="run", values=column)
            more = (values[run] - values["voice/RAND"]).dropna()
            half = t.ppf(0.975, len(more) - 1) * more.sem()
            row |= {"seeds": len(more)}
            row[column] = shown(more.mean(), more.mean() - half, more.mean() + half, 2)
        rows.append(row)
    return rows


def main() -> None:
    runs = voice_runs()
    draw_figure4(runs, FOLDER / "figure4.png")
    print(f"\n**Table 2**\n\n{voice_table2(runs)}")
    print_table("Table 3: training time reduction", table3())
    print_table("The five conclusions: change of VL3 in %, intervals jointly of each", claims())
    for title, loss in LOSSES.items():
        print_table(
            f"Change from RAND in %, {title}, each with its own interval", from_random(loss)
        )
    print_table("SSB-DBS-BR with more epochs than RAND, on the voice", more_epochs())
    draw_lrf(FOLDER / "figure_lrf.png")
    print_table("Other settings: masked losses, change from RAND's in %", studies_table(False))
    print_table("SSB-DBS-BR from RAND with the same setting", studies_table(True))
    print_table("SSB-DBS-BR's speech beside RAND's", speech())


if __name__ == "__main__":
    main()
