"""Compare runs of train.py, finished or not, and put the paper's experiments beside the paper.

    python scripts/results.py runs/demo
    python scripts/results.py runs/table2 --figure figure4.png    # draws the paper's Figure 4 too

Takes all runs in the folders given. Those that differ in their seed alone are averaged: mean ±
standard error, or "–" where a seed has no such number. All else that differs is a column. With RAND
among the runs, it prints Tables 2 to 4 of Ge et al. (Interspeech 2021) too.

Padding (ZPR), average batch length in frames (ABL), batches, and decoder steps (the sum of the
batches' lengths) are means over the epochs; minutes an epoch are the median. The losses (masked:
over real frames only) and the alignment score (1: on the diagonal) are the last validation's.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batching import Batching, read_batching
from cli import ArgumentParser, UserError, exit_on_user_error, make_folder
from hparams import MAY_CHANGE, HParams

# The paper's Table 2; n_batches is from its Sec. 4, and minutes an epoch of a GeForce GTX 1080.
PAPER = pd.read_csv(Path(__file__).parent / "paper_table2.csv", index_col="batching")
STAGED = ["VL1", "VL2", "VL3", "VLavg"]
TABLE2 = {"zpr": 2, "abl": 2, "minutes": 3} | dict.fromkeys(STAGED, 3)  # quantities and digits
TABLE4 = ["SB → SSB", "SB-BR → SSB-BR", "SB-DBS → SSB-DBS"]
TABLE4 += ["SB → SB-BR", "SSB → SSB-BR", "SSB-DBS → SSB-DBS-BR"]
TABLE4 += ["SB → SB-DBS", "SSB → SSB-DBS", "SSB-BR → SSB-DBS-BR"]
TABLE2_NOTE = (
    "The paper's are in parentheses. VL1, VL2 and VL3: validation losses after 100, 160 and 220 "
    "of 220 epochs, or in proportion, averaged with neighbours. VLavg: mean from VL1's to VL3's."
)
COLUMNS = {  # of the table of all runs: quantities and digits
    "ZPR %": ("zpr", 2),
    "ABL": ("abl", 1),
    "batches": ("n_batches", 1),
    "steps": ("total_length", 0),
    "validation loss": ("loss", 4),
    "masked": ("masked_loss", 4),
    "alignment": ("diagonality", 2),
    "min / epoch": ("minutes", 3),
}
AVERAGED = ["minutes", "zpr", "abl", "n_batches", "total_length"]  # over the epochs
VALIDATED = ["loss", "masked_loss", "diagonality"]
CONDITIONS = ["device", "threads", "decoder", "torch"]  # of each start: times depend on them
STARTED = ["training_frames", "validation_frames", *CONDITIONS]
RECORDED = ["event", "epoch", "hours", "epochs", *STARTED, *AVERAGED, *VALIDATED]
# What tells no runs apart: what a resume may change, but for the end of a run.
SAME_RUN = {*Batching._fields, "seed", *MAY_CHANGE, *CONDITIONS} - {"epochs", "hours"}


class Run(NamedTuple):
    path: Path
    batching: Batching
    settings: dict[str, Any]  # and STARTED
    done: int  # epochs
    end: int | None  # epochs of the whole run; None: not decided yet
    epochs: pd.DataFrame  # by number, from 1: AVERAGED
    validations: pd.DataFrame  # by epoch: VALIDATED


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Reads all runs that are or lie in ``folders``."""
    files = []
    for folder in folders:
        found = sorted(folder.rglob("hparams.json"))
        files += found
        if not found:
            raise UserError(f"{folder}: holds no run; name the output of train.py or run_all.sh")
    return [read_run(file.parent) for file in dict.fromkeys(files)]


def read_run(folder: Path) -> Run:
    """Reads a run's settings and records, without a last line that is still being written."""
    place = folder / "hparams.json"
    try:
        settings = vars(HParams()) | json.loads(place.read_text(encoding="utf-8"))
        batching = read_batching(str(Batching(*(settings[name] for name in Batching._fields))))
        place, records = folder / "metrics.jsonl", []
        lines = place.read_text("utf-8", "backslashreplace").split("\n")[:-1]
        for number, line in enumerate(lines, 1):
            place = f"{folder}/metrics.jsonl:{number}"
            record = json.loads(line)
            if record["event"] != "step":
                records.append(record)
        records = pd.DataFrame(records, columns=RECORDED, dtype=object)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{place}: cannot be read ({error!r})"
        raise UserError(f"{problem}; mend it, or name another run") from None
    records.index = records.epoch.astype(int) + 1
    for name in STARTED:
        values = records[name][records.event == "start"]
        settings[name] = " and ".join(values.astype(str).unique())
    end = None if settings["hours"] else settings["epochs"]
    for planned in records.epochs[records.hours == settings["hours"]]:
        end = planned
    epochs = records[records.event == "epoch"][AVERAGED].astype(float)
    validations = records[records.event == "validation"][VALIDATED].astype(float)
    done = max(epochs.index, default=0)
    return Run(folder, batching, settings, done, end, epochs, validations)


def smooth(losses: Iterable[float]) -> list[float]:
    """Averages each loss with the previous and the next, if they exist (Sec. 6)."""
    losses = list(losses)
    return [fmean(losses[max(i - 1, 0) : i + 2]) for i in range(len(losses))]


def pick_stages(run: Run) -> pd.Series:
    """Returns VL1, VL2, VL3 and VLavg: nan where a loss is missing or not finite."""
    start, end = run.done - len(run.epochs), run.end or run.done
    period = run.settings["epochs_per_validation"]
    epochs = [epoch for epoch in range(period, end, period) if epoch > start]
    epochs.append(end)  # those that are validated
    if len(epochs) < 4:  # smoothing three would average all of them
        return pd.Series(math.nan, STAGED)
    losses = run.validations.loss.reindex(epochs).to_list()
    stages = []
    for stage in (100, 160, 220):
        target = start + (end - start) * stage / 220
        distances = [abs(epoch - target) for epoch in epochs]
        stages.append(distances.index(min(distances)))
    values = [smooth(losses)[i] for i in stages]
    return pd.Series([*values, fmean(losses[stages[0] :])], STAGED)


def compare(runs: list[Run]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Returns a row for each group of runs that differ in their seed alone: its labels (batching,
    what differs between groups, seeds, epochs), means over the seeds, and their standard errors."""
    names = [str(run.batching) for run in runs]
    order = dict.fromkeys([*PAPER.index, *sorted(names)])  # of the rows
    facts = pd.DataFrame([run.settings for run in runs], dtype=object)
    facts = facts.map(lambda value: str(value) if isinstance(value, list) else value)
    differing = [name for name in facts if facts[name].nunique() > 1]
    keys = facts[[name for name in differing if name not in SAME_RUN]]
    keys.insert(0, "batching", pd.Categorical(names, order, ordered=True))
    again = keys.assign(seed=facts.seed).duplicated()
    if again.any():
        path = runs[again.argmax()].path
        raise UserError(f"{path}: has the settings and seed of another run; name one of them")
    group = keys.groupby(list(keys), observed=True, dropna=False).ngroup()  # sorted
    labels = keys.groupby(group).first().assign(seeds=group.value_counts())
    varying = facts[[name for name in differing if name in CONDITIONS]]
    varying = varying.assign(epochs=[f"{run.done}/{run.end or '?'}" for run in runs])
    for name in varying:
        labels[name] = varying[name].groupby(group).agg(lambda seeds: ", ".join(seeds.unique()))
    seeds = pd.DataFrame([averages(run) for run in runs]).groupby(group)
    mean = seeds.agg(lambda values: values.mean(skipna=False))
    return labels, mean, seeds.agg(lambda values: values.sem(skipna=False))


def averages(run: Run) -> pd.Series:
    """Returns the quantities of a run that are averaged over seeds."""
    means = run.epochs.mean()
    means.zpr *= 100
    means.minutes = run.epochs.minutes.median()
    newest = run.validations.tail(1).mean()
    return pd.concat([means, newest, pick_stages(run)])


def note_rates(runs: list[Run]) -> str:
    """Says whether all runs had one learning rate."""
    rates = sorted({run.settings["learning_rate"] for run in runs})
    if len(rates) > 1:
        return f"The runs had different learning rates: {', '.join(map(str, rates))}."
    return f"All runs had a learning rate of {rates[0]}. Each batching has its own best rate."


def cell(mean: float, error: float, digits: int, paper: float = math.nan) -> str:
    """Writes ``mean ± standard error (the paper's)``, as far as they are known."""
    text = "–" if math.isnan(mean) else f"{mean:,.{digits}f}"
    if not math.isnan(error):
        text += f" ± {error:,.{digits}f}"
    return text if math.isnan(paper) else f"{text} ({paper:.{digits}f})"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Writes a Markdown table with aligned columns; the first row is its heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = (" | ".join(map(str.rjust, row, widths)) for row in (rows[0], rule, *rows[1:]))
    return "\n".join(f"| {line} |" for line in lines)


def general_table(labels: pd.DataFrame, mean: pd.DataFrame, error: pd.DataFrame) -> str:
    rows = [[*labels, *COLUMNS]]
    for i in labels.index:
        row = list(labels.loc[i].astype(str))
        for quantity, digits in COLUMNS.values():
            row.append(cell(mean[quantity][i], error[quantity][i], digits))
        rows.append(row)
    return markdown(rows)


def paper_tables(labels: pd.DataFrame, mean: pd.DataFrame, error: pd.DataFrame) -> list[str]:
    """Returns the paper's Tables 2, 3 and 4; none unless the runs are RAND and others, with a row
    for each batching, and there are validations enough."""
    names = list(labels.batching)
    is_paper = "RAND" in names and len(names) > 1 and labels.batching.is_unique
    if not is_paper or mean.VL3.isna().all():
        return []
    mean, error = mean.set_axis(names), error.set_axis(names)
    paper = PAPER.reindex(index=names, columns=mean.columns)

    def value(name: str, quantity: str) -> str:
        digits, in_paper = TABLE2[quantity], paper[quantity][name]
        return cell(mean[quantity][name], error[quantity][name], digits, in_paper)

    def reduction(before: str, after: str, quantity: str) -> str:
        """Returns by how many percent ``after`` is below ``before``."""
        ratio = 100 * mean[quantity][after] / mean[quantity][before]
        paper_ratio = 100 * paper[quantity][after] / paper[quantity][before]
        errors = error[quantity] / mean[quantity]
        ratio_error = ratio * math.hypot(errors[before], errors[after])
        return cell(100 - ratio, ratio_error, 2, 100 - paper_ratio)

    table2 = [["Batching", "Seeds", "ZPR %", "ABL", "min/epoch", *STAGED]]
    for name, n_seeds in zip(names, labels.seeds, strict=True):
        values = [value(name, quantity) for quantity in TABLE2]
        table2.append([name, str(n_seeds), *values])
    table3 = [["From RAND to", "time saved %", "fewer decoder steps %"]]
    for name in names[1:]:
        time = reduction("RAND", name, "minutes")
        steps = reduction("RAND", name, "total_length")
        table3.append([name, time, steps])
    table4 = [["From → to", "VL3", "VL3", "reduction %"]]
    for pair in TABLE4:
        before, after = pair.split(" → ")
        if before in names and after in names:
            losses = [value(before, "VL3"), value(after, "VL3")]
            table4.append([pair, *losses, reduction(before, after, "VL3")])
    tables = {f"Table 2. {TABLE2_NOTE}": table2, "Table 3": table3, "Table 4": table4}
    return [f"{title}\n\n{markdown(rows)}" for title, rows in tables.items() if len(rows) > 1]


def draw_figure4(runs: Sequence[Run], path: Path) -> None:
    """Draws the validation losses over epochs, smoothed: mean and range over the seeds."""
    axes = (figure := Figure(figsize=(9, 4.8), layout="constrained")).subplots()
    for batching in sorted({run.batching for run in runs}):
        losses = [run.validations.loss for run in runs if run.batching == batching]
        curves = [pd.Series(smooth(curve), curve.index, dtype=float) for curve in losses]
        seeds = pd.concat(curves, axis=1, join="inner")
        # The first fifth is so steep that it would hide the rest.
        seeds = seeds[len(seeds) // 5 :]
        style = "o" if batching.batch_randomization else "^"
        style += "--" if batching.dynamic_batch_size else "-"
        axes.plot(seeds.mean(axis=1), style, label=str(batching), markersize=4)
        axes.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), alpha=0.12)
    axes.set(xlabel="epochs", ylabel="validation loss, smoothed")
    axes.legend(title="dashed: DBS; circles: BR", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=160, format="png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of train.py or run_all.sh")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the losses in this file")
    args = parser.parse_args(argv)
    runs = read_runs(args.runs)
    labels, mean, error = compare(runs)
    print(f"{general_table(labels, mean, error)}\n\n{note_rates(runs)}")
    for table in paper_tables(labels, mean, error):
        print(f"\n{table}")
    if args.figure and not labels.batching.is_unique:
        parser.error("argument --figure: runs of one batching differ in more than their seed")
    if args.figure:
        make_folder(args.figure.parent)
        draw_figure4(runs, args.figure)


if __name__ == "__main__":
    exit_on_user_error(main)
