"""Prints the numbers of docs/results.md and docs/results/appendix.md from the records beside this
file, and draws their figures.

    python docs/results/comparisons.py

Losses compare by their ratios, in percent. All intervals are of 95 %, for other seeds of the same
corpus, split and model.
"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas.core.groupby import DataFrameGroupBy
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import plot_batching
from scripts.plot_batching import COLOURS
from scripts.results import PAPER, markdown

FOLDER = Path(__file__).resolve().parent
ARMS = ["RAND", "SSB-BR", "SSB-DBS-BR"]
PLANNED = "RAND → SSB-BR, RAND → SSB-DBS-BR, SSB-BR → SSB-DBS-BR"  # of rates and same_time
# Of same_time, added later: SSB-DBS-BR at the default rate
ADDED = "RAND → SSB-DBS-BR-1e-3, SSB-BR → SSB-DBS-BR-1e-3, SSB-DBS-BR → SSB-DBS-BR-1e-3"
# Of same_time: their columns, whether changes are ratios (None: seeds had different processors, so
# there are none), and the digits shown
MEASURES = {
    "masked loss": ("masked_loss", True, 3),
    "MCD (dB)": ("MCD (dB)", False, 2),
    "hours": ("hours", None, 2),
    "failures": ("any of these %", False, 1),
    "words misheard %": ("misheard", False, 1),
    "opinion": ("opinion", False, 2),
}
PRIMARY = ("masked loss", "MCD (dB)")
PADDING = "RAND → RAND step, SSB-BR → SSB-BR step, SSB-BR → SSB-BR batches, RAND step → SSB-BR step"
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
SHARED_START = {  # series whose seeds share a start: file and loss
    "voice": ("table2", "loss"),
    "re-estimated": ("table2", "precise_loss"),
    "synthetic": ("longest_first", "loss"),
    "synthetic, re-estimated": ("longest_first", "precise_loss"),
    "synthetic, shortest first": ("shortest_first", "loss"),
}
# Of the series rates: an epoch is on the plateau if its training loss over real frames is above the
# level, and more than this part of the one before. Rates tie if their losses are within a ratio.
# At higher rates than STABLE, most runs stay on the plateau.
PLATEAU_LEVEL, PLATEAU_RATIO, TIE, STABLE = 2.2, 0.9, 1.01, 2e-3


def fit(values: pd.Series, by_seed: bool) -> tuple[pd.DataFrame, np.ndarray, float, float]:
    """Fits an effect of each arm, and if ``by_seed`` one of each seed, to values by arm and seed.
    Returns the design, the effects, and the residual variance with its degrees of freedom."""
    arms, seeds = (pd.get_dummies(values.index.get_level_values(i), dtype=float) for i in (0, 1))
    design = arms.join(seeds.iloc[:, 1:]) if by_seed else arms
    effects = np.linalg.lstsq(design.to_numpy(), values.to_numpy())[0]
    df = len(design) - len(effects) or np.nan  # one run of each arm has no spread
    residuals = values.to_numpy() - design @ effects
    return design, effects, (residuals**2).sum() / df, df


def change(
    values: pd.Series, pair: str, n_joint: int, ratio: bool = True, shared_start: bool = False
) -> np.ndarray:
    """Returns the change of a ``pair``, "before → after", and the ends of its interval; in percent
    if it is a ``ratio``; nan where unknown. With ``shared_start`` each seed has an effect.

    The spread is pooled over all arms. ``n_joint`` intervals hold at once, by Bonferroni.
    """
    values = np.log(values.dropna()) if ratio else values.dropna()
    before, after = pair.split(" → ")
    if not {before, after} <= {*values.index.unique("arm")}:
        return np.full(3, np.nan)
    design, effects, variance, df = fit(values, shared_start)
    weights = np.array([(name == after) - (name == before) for name in design], float)
    error = np.sqrt(variance * weights @ np.linalg.inv(design.T @ design) @ weights)
    half = stats.t.ppf(1 - 0.025 / n_joint, df) * error
    result = weights @ effects + np.array([0, -half, half])
    return 100 * np.expm1(result) if ratio else result


def shown(change: np.ndarray, digits: int = 1) -> str:
    """Writes a change and its interval; with more digits where rounding would hide the sign."""
    mean, low, high = (
        f"{value:+.{digits}f}" if round(value, digits) else f"{value:+.1g}" for value in change
    )
    return "" if mean == "+nan" else f"{mean} ({low} to {high})"


# The series same_time


def read_runs(file: str) -> DataFrameGroupBy:
    """Reads records by arm and seed."""
    records = pd.read_csv(FOLDER / file)
    records["arm"] = records.experiment + records.part.str.replace(r"epochs\d+", "", regex=True)
    return records.groupby(["arm", "seed"])


def measure() -> pd.DataFrame:
    """Returns a row for each run, by arm and seed: its epochs, learning rate and measures."""
    runs = read_runs("same_time.csv")
    hours = (runs.processor_minutes.sum() / 60).rename("hours")
    tables = [runs[["epoch", "learning_rate"]].max(), runs.masked_loss.last(), hours]
    for kind in ("speech", "heard"):
        tables.append(read_runs(f"same_time_{kind}.csv").mean(numeric_only=True))
    columns = {column: name for name, (column, *_) in MEASURES.items()}
    table = pd.concat(tables, axis=1).rename(columns=columns)
    return table.reindex(columns=["epoch", "learning_rate", *MEASURES])


def print_same_time() -> None:
    """Prints each seed's measures and their means, and how they change from arm to arm."""
    runs = measure()
    table = runs.groupby("arm")[["epoch", "learning_rate"]].max()
    pairs, rows = PLANNED.split(", "), []
    for pair in (*pairs, *ADDED.split(", ")):
        rows.append({"from → to": pair})
        planned = pair in pairs
        compared = runs.loc[ARMS] if planned else runs
        for name, (_, ratio, digits) in MEASURES.items():
            if ratio is None:
                continue
            n_joint = len(pairs) * len(PRIMARY) if planned and name in PRIMARY else 1
            result = change(compared[name], pair, n_joint, ratio)
            rows[-1][name] = shown(result, digits=1 if ratio else digits)
    for name, (_, _, digits) in MEASURES.items():
        for arm, values in runs[name].dropna().groupby("arm"):
            seeds = ", ".join(f"{value:.{digits}f}" for value in values)
            table.loc[arm, name] = f"{seeds}: {values.mean():.{digits}f}"
    print_table("same_time: each seed's, and means", table.fillna("").reset_index())
    print_table("same_time: changes, in % of losses", pd.DataFrame(rows))
    print(f"\nPlanned intervals of {' and '.join(PRIMARY)} hold jointly, all others alone.")


# The series rates, and padding, which compares with its runs at 1e-3


def read_rates() -> pd.DataFrame:
    """Returns a row for each run, by arm, learning rate and seed."""
    files = [FOLDER / "rates.csv", *FOLDER.glob("padding.csv")]
    records = pd.concat(pd.read_csv(file, dtype={"part": str}) for file in files)
    records["arm"] = (records.experiment + " " + records.part).str.replace(r" \d.*", "", regex=True)
    records["rate"] = pd.to_numeric(records.part, errors="coerce").fillna(1e-3)  # padding's
    keys = ["arm", "rate", "seed"]
    records["real_loss"] = records.training_loss / (1 - records.zpr)  # padding has next to no loss
    before = records.groupby(keys).real_loss.shift()
    flat = (records.real_loss > PLATEAU_LEVEL) & (records.real_loss > PLATEAU_RATIO * before)
    records["plateau"] = records.epoch.astype(str).where(flat, "")
    records["alignment"] = records.diagonality.where(records.epoch == 4)
    means = dict.fromkeys(("clipped", "grad_norm", "alignment"), "mean")
    runs = records.groupby(keys).agg({"masked_loss": "last", **means, "plateau": " ".join})
    return runs.assign(plateau=runs.plateau.str.split().str.join(" ").replace("", "none"))


def print_rates(runs: pd.DataFrame) -> None:
    """Prints means over the seeds, and changes at each rate and with each arm at its rate: the
    lowest that ties with that of the lowest loss. Intervals have the spread of all stable runs."""
    groups = runs.groupby(["arm", "rate"])
    table = groups.mean(numeric_only=True)  # sorted
    ties = table[table.masked_loss <= TIE * table.groupby("arm").masked_loss.transform("min")]
    taken = ties.groupby("arm").head(1).index
    table = table.assign(plateau=groups.plateau.agg(", ".join), seeds=groups.size())
    table["taken"] = np.where(table.index.isin(taken), "yes", "")
    print_table("rates: means over the seeds", table.round(3).reset_index())
    stable = runs.reset_index().query("rate <= @STABLE")
    arms = stable.arm + stable.rate.map(" {:g}".format)
    losses = stable.assign(arm=arms).set_index(["arm", "seed"]).masked_loss
    rates = {f"{rate:g}": dict.fromkeys(stable.arm, rate) for rate in sorted({*stable.rate})}
    rows = []
    for name, rate in (rates | {"its own": dict(taken)}).items():
        rows.append({"rate": name})
        for pairs in (PLANNED.split(", "), PADDING.split(", ")):
            for pair in pairs:
                before, after = (f"{arm} {rate[arm]:g}" for arm in pair.split(" → "))
                rows[-1][pair] = shown(change(losses, f"{before} → {after}", len(pairs)))
    print_table("rates and padding: changes of the masked loss in %", pd.DataFrame(rows))
    rows = []
    for arm in ARMS:
        rows.append({"arm": arm})
        for low, high in pairwise(sorted({*stable.rate})):
            result = change(losses, f"{arm} {low:g} → {arm} {high:g}", 2)
            rows[-1][f"{low:g} → {high:g}"] = shown(result)
    print_table("rates: changes of the masked loss in % from rate to rate", pd.DataFrame(rows))


def draw_rates(runs: pd.DataFrame, path: Path) -> None:
    """Draws masked losses over the learning rate: each seed's, and their means."""
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for colour, (arm, losses) in zip(COLOURS, runs.masked_loss.groupby("arm"), strict=False):
        axes.plot(losses.index.get_level_values("rate"), losses, "o", color=colour, markersize=4)
        mean = losses.groupby("rate").mean()
        axes.plot(mean, color=colour, linewidth=2, label=arm)
    axes.set(xlabel="learning rate", ylabel="masked validation loss", xscale="log", ylim=(1.3, 1.7))
    axes.set_xticks(mean.index, mean.index)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


# The paper's comparisons, in series whose seeds share a start


def final_losses(series: str, loss: str) -> pd.Series:
    """Returns the mean of each run's last two validations (the paper's VL3), by arm and seed."""
    records = pd.read_csv(FOLDER / f"{series}.csv").rename(columns={"experiment": "arm"})
    runs = records[records.part == "annealed"].dropna(subset=loss).groupby(["arm", "seed"])
    return runs[loss].agg(lambda losses: losses.tail(2).mean())


def verdict(sign: int, low: float, high: float) -> str:
    """Says whether an interval of percents is on the side of zero that the paper says; or, of "as
    good as" (0), within ``SIMILAR``."""
    if sign == 0:
        yes, no = max(-low, high) < SIMILAR, min(-low, high) < -SIMILAR
    else:
        low, high = sorted((sign * low, sign * high))
        yes, no = low > 0, high < 0
    return "yes" if yes else "no" if no else "undecided"


def paper_comparisons() -> pd.DataFrame:
    """Returns a row for each comparison of the paper: its change, ours, and whether it holds."""
    losses = {name: final_losses(*source) for name, source in SHARED_START.items()}
    rows = []
    for conclusion, (pairs, sign) in CONCLUSIONS.items():
        for pair in (pairs := pairs.split(", ")):
            before, after = pair.split(" → ")
            paper = 100 * (PAPER.VL3[after] / PAPER.VL3[before] - 1)
            row = {"": conclusion, "from → to": pair, "paper": f"{paper:+.1f}"}
            for name in SHARED_START:
                result = change(losses[name], pair, len(pairs), shared_start=True)
                row[name] = shown(result)
                if name == "voice":
                    row["holds"] = verdict(sign, *result[1:])
            rows.append(row)
    return pd.DataFrame(rows)


def print_table(title: str, rows: pd.DataFrame) -> None:
    print(f"\n**{title}**\n\n{markdown([list(rows), *rows.astype(str).to_numpy()])}")


def main(figures: Path = FOLDER) -> None:
    plot_batching.main([])  # padding
    epochs = pd.read_csv(FOLDER / "predicted.csv").groupby("experiment").processor_minutes.median()
    print("\nMinutes of an epoch of same_time:", epochs.round(2).to_dict())
    print("saved of RAND's, %:", (100 - 100 * epochs / epochs.RAND).round(1).to_dict())
    print_same_time()
    rates = read_rates()
    print_rates(rates)
    draw_rates(rates.loc[ARMS], figures / "rates.png")
    heard = pd.read_csv(FOLDER / "heard.csv", index_col="speech")
    means = heard.groupby(lambda name: name.partition(",")[0]).mean()  # over seeds
    print_table("As heard", means.loc[["recordings", "voices/kathleen.pt"]].round(2).reset_index())
    batches = pd.read_csv(FOLDER / "table2.csv").groupby("experiment").n_batches.mean()
    print("Batches an epoch, on the voice:", batches.round(1).to_dict())
    print_table("The paper's comparisons: VL3 in %, intervals jointly", paper_comparisons())


if __name__ == "__main__":
    main()
