"""Prints the comparisons that docs/results.md gives, from the records beside this file.

    python docs/results/comparisons.py

Each CSV is a series of runs, with a row for each validation. ``epoch`` and ``step`` count what the
run had done by then, its start included; ``minutes``, ``n_batches``, ``total_length`` (decoder
steps), ``zpr`` and ``abl`` are of one epoch, averaged since the validation before.
``precise_loss`` is validated with batch norm's statistics re-estimated. SB and SSB sorted the
shortest clips first, as the column ``longest_first`` says; only longest_first.csv has the others.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

LOSSES = {"as validated": "loss", "re-estimated": "precise_loss"}
PAPER = {  # VLavg in the paper's Table 2
    "RAND": 0.325, "SB-BR": 0.329, "SSB-BR": 0.332, "BKT-BR": 0.331, "ATS-BR": 0.331,
    "SB": 0.388, "SSB": 0.378, "SB-DBS": 0.347, "SSB-DBS": 0.330, "SSB-DBS-BR": 0.322,
}  # fmt: skip
CONCLUSIONS = (  # the paper's, in order: series, comparisons, how many intervals hold jointly
    ("annealed", "BKT-BR → SSB-BR, ATS-BR → SSB-BR", 2),
    ("annealed", "RAND → SSB-BR, RAND → BKT-BR, RAND → ATS-BR", 6),
    ("common", "RAND in SSB-BR's time → SSB-BR, RAND in BKT-BR's time → BKT-BR", 6),
    ("common", "RAND in ATS-BR's time → ATS-BR", 6),
    ("annealed", "RAND → SSB-DBS-BR", 1),
    ("annealed", "SB → SSB", 3),
    ("annealed", "SB → SB-BR, SSB → SSB-BR, SSB-DBS → SSB-DBS-BR", 8),
    ("annealed", "SB → SB-DBS, SSB → SSB-DBS, SSB-BR → SSB-DBS-BR", 8),
)
OTHERS = (  # each with its own interval
    ("common", "SB → SB-BR, SB-BR → SSB-BR", 1),
    ("annealed", "SB → SB-BR, SB-BR → SSB-BR", 1),
    ("equal_updates", "RAND → SSB-DBS-BR", 1),  # which has a third more epochs
    ("scratch", "RAND in SSB-DBS-BR's updates → SSB-DBS-BR", 1),
    ("longest_first", "RAND → SB, RAND → SSB, RAND → SB-DBS, RAND → SSB-DBS", 1),
)
SERIES = {  # the columns of the second table
    "first part": "common",
    "second part": "annealed",
    "start by SSB-BR": "ssb_annealed",
    "from scratch": "scratch",
    "longer clips": "long",
}


def read(series: str) -> pd.DataFrame:
    """Reads the records of a series. Those of equal_updates compare with the second part."""
    records = pd.read_csv(Path(__file__).with_name(f"{series}.csv"))
    if series == "equal_updates":
        renamed = {"experiment": {"SSB-DBS-BR": "SSB-DBS-BR, equal epochs"}}
        records = pd.concat([records, read("annealed").replace(renamed)])
    if series == "longest_first":
        records = records[records.part == "common"].rename(columns={"epochs": "epoch"})
    return records


def mean_and_error(records: pd.DataFrame, quantity: str, *by: str) -> pd.DataFrame:
    """Returns mean and standard error over seeds of a quantity of an epoch (of minutes, the
    median)."""
    average = "median" if quantity == "minutes" else "mean"
    runs = records.groupby([*by, "seed"])[quantity].agg(average)
    return runs.groupby(list(by)).agg(["mean", "sem"])


def final_logs(series: str, loss: str) -> pd.DataFrame:
    """Returns the logarithm of each run's final loss: a row for each seed, a column for each
    experiment. It is the mean over the last four validations (VLavg); from scratch, over the last
    two (VL3)."""
    last = read(series).groupby(["seed", "experiment"]).tail(2 if series == "scratch" else 4)
    return np.log(last.pivot_table(loss, "seed", "experiment"))


def random_within(series: str, loss: str, experiment: str, resource: str) -> pd.Series:
    """RAND's final log loss of each seed after as much "time", or as many "updates", as another
    experiment takes for all its epochs, interpolated between validations."""
    records = read(series)
    if resource == "time":
        taken = mean_and_error(read("timing"), "minutes", "experiment")["mean"]
    else:
        taken = mean_and_error(records, "n_batches", "experiment")["mean"]
    share = min(taken[experiment] / taken["RAND"], 1)
    random = records[records.experiment == "RAND"].pivot(index="epoch", columns="seed", values=loss)
    epochs = random.index.to_numpy()
    start = 2 * epochs[0] - epochs[1]  # the validations are equally far apart
    points = start + share * (epochs - start)
    within = random.apply(lambda losses: np.interp(points, epochs, losses))
    return np.log(within.tail(2 if series == "scratch" else 4).mean())


def residual(logs: pd.DataFrame) -> tuple[float, int]:
    """Returns the standard deviation that experiment and seed do not explain, and its degrees of
    freedom.

    Runs of one seed share their start. So the logarithm of a loss is an effect of the experiment,
    plus an effect of the seed, plus a residual: a randomised block design.
    """
    runs = logs.unstack().dropna()
    design = pd.get_dummies(runs.index.to_frame().astype(str)).to_numpy(float)
    fit, _, rank, _ = np.linalg.lstsq(design, runs, rcond=None)
    df = len(runs) - rank
    return float(np.sqrt(np.square(runs - design @ fit).sum() / max(df, 1))), df


def change(
    before: pd.Series, after: pd.Series, sd: float, df: int, n_joint: int = 1
) -> list[float]:
    """Returns how much the loss changes, in percent, and the ends of its 95 % interval, from log
    losses paired by seed. ``n_joint`` intervals hold at once (Bonferroni). The ends are nan if the
    residual has fewer than four degrees of freedom."""
    differences = (after - before).dropna()
    half = np.nan
    if df >= 4:
        half = t.ppf(1 - 0.025 / n_joint, df) * sd * np.sqrt(2 / len(differences))
    return [100 * np.expm1(differences.mean() + x) for x in (0, -half, half)]


def shown(change: float, low: float, high: float) -> str:
    return f"{change:+.1f}" + ("" if np.isnan(low) else f" ({low:+.1f} to {high:+.1f})")


def paper_change(before: str, after: str) -> str:
    return f"{100 * (PAPER[after] / PAPER[before] - 1):+.1f}" if before in PAPER else "–"


def print_table(title: str, rows: list[dict[str, object]]) -> None:
    """Prints rows as Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    print(f"\n**{title}**\n", *(f"| {' | '.join(map(str, line))} |" for line in lines), sep="\n")


def comparisons(choice: tuple[tuple[str, str, int], ...]) -> list[dict[str, str]]:
    """Returns a row for each comparison, as validated and re-estimated."""
    rows = []
    for series, pairs, n_joint in choice:
        for pair in pairs.split(", "):
            before, after = pair.split(" → ")
            row = {"series": series, "from → to": pair, "paper %": paper_change(before, after)}
            for title, loss in LOSSES.items():
                logs = final_logs(series, loss)
                first = logs.get(before)
                if first is None:  # such as "RAND in SSB-BR's time"
                    first = random_within(series, loss, after, before.split()[-1])
                row[title] = shown(*change(first, logs[after], *residual(logs), n_joint))
            rows.append(row)
    return rows


def from_random() -> list[dict[str, str]]:
    """Returns the change from RAND to each experiment, re-estimated, in every series."""
    logs = {title: final_logs(series, "precise_loss") for title, series in SERIES.items()}
    rows = []
    for name in list(PAPER)[1:]:
        row = {"RAND → …, %": name, "paper": paper_change("RAND", name)}
        for title, table in logs.items():
            known = name in table
            row[title] = shown(*change(table.RAND, table[name], *residual(table))) if known else ""
        rows.append(row)
    return rows


def time_saved() -> list[dict[str, str]]:
    """Returns the paper's Table 3: time from the series timing, steps and frames from the first
    part."""
    rows = []
    for name in list(PAPER)[1:]:
        minutes = mean_and_error(read("timing"), "minutes", "experiment").loc[["RAND", name]]
        saved, error = -minutes["mean"].diff().iloc[1], np.hypot(*minutes["sem"])
        row = {"From RAND to": name, "saved, min/epoch": f"{saved:.3f} ± {error:.3f}"}
        for title, series, quantity in (
            ("saved %", "timing", "minutes"),
            ("fewer decoder steps %", "common", "total_length"),
            ("fewer padded frames %", "common", "abl"),
        ):
            pair = mean_and_error(read(series), quantity, "experiment").loc[["RAND", name]]
            ratio = 100 * pair["mean"].iloc[1] / pair["mean"].iloc[0]
            error = ratio * np.hypot(*(pair["sem"] / pair["mean"]))
            row[title] = f"{100 - ratio:.2f} ± {error:.2f}"
        rows.append(row)
    return rows


def sweep() -> list[dict[str, object]]:
    """Returns masked losses of each batch size after the most epochs, steps and minutes that every
    run has taken, interpolated between validations."""
    records, by = read("sweep"), ["experiment", "batch_size"]
    runs = records.groupby(by)
    taken = pd.DataFrame({"epochs": records.epoch - records.epoch.min() + 1.0})
    taken["steps"] = taken.epochs * runs.n_batches.transform("mean")
    medians = mean_and_error(records, "minutes", *by)["mean"].rename("median").reset_index()
    taken["minutes"] = taken.epochs * records.merge(medians, how="left", on=by)["median"]
    ends = taken.groupby([records[name] for name in by]).max().min()
    rows = []
    for key, group in runs:
        batches, zpr = (mean_and_error(group, name, *by).iloc[0] for name in ("n_batches", "zpr"))
        row = dict(zip(("Batching", "batch_size"), key, strict=True))
        row["batches"] = "{:.1f} ± {:.1f}".format(*batches)
        row["steps"] = f"{taken.steps[group.index].max():,.0f}"
        row["ZPR %"] = "{:.2f} ± {:.2f}".format(*100 * zpr)
        for unit, digits in (("epochs", 0), ("steps", 0), ("minutes", 2)):
            losses = pd.Series([
                np.interp(ends[unit], taken[unit][run.index], run.masked_loss)
                for _, run in group.groupby("seed")
            ])  # fmt: skip
            title = f"loss after {ends[unit]:.{digits}f} {unit}"
            row[title] = f"{losses.mean():.3f} ± {losses.sem():.3f}"
        rows.append(row)
    return rows


def main() -> None:
    title = "The paper's conclusions: change of the loss in %, 95 % intervals jointly of each"
    print_table(title, comparisons(CONCLUSIONS))
    print_table("Other comparisons, each with its own 95 % interval", comparisons(OTHERS))
    print_table("After the same epochs, re-estimated, each with its own interval", from_random())
    print_table("Table 3: training time reduction", time_saved())
    print_table("Sweep of batch_size: losses after the same epochs, steps and time", sweep())
    print()
    for series in ("common", "annealed"):
        for title, loss in LOSSES.items():
            sd, df = residual(final_logs(series, loss))
            print(f"{series}, {title}: residual sd {sd:.1%}, {df} degrees of freedom")
    effect = np.expm1((final_logs("common", "precise_loss") - final_logs("common", "loss")).mean())
    print(f"common: re-estimating changes SB by {effect.SB:+.1%}, SB-BR by {effect['SB-BR']:+.1%}")
    for series in ("common", "annealed", "third", "long"):
        losses = read(series).query("experiment == 'RAND'").groupby("epoch").loss.mean()
        fall = losses.iloc[-2:].mean() / losses.iloc[1:4].mean()  # from VL1 to VL3
        power = np.log(fall) / np.log(losses.index[-1] / losses.index[2])
        print(f"{series}: 10 % more epochs lower RAND's loss by {1 - 1.1**power:.1%}")


if __name__ == "__main__":
    main()
