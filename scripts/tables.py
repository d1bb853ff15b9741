"""Fill the paper's Tables 1-4 and judge its five conclusions, from what runs of train.py recorded.

    python scripts/tables.py runs/table2                       # the output of run_all.sh
    python scripts/tables.py runs/seed0 runs/seed1 --output runs/both

Prints the tables and the conclusions, and writes table1-4 as Markdown and CSV, and conclusions.md.
Unfinished runs count as far as they have got; what is still missing is listed.
"""

import argparse
import csv
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from files import make_folder
from scripts.paper import (
    COMPARISONS,
    CONCLUSIONS,
    EXPERIMENTS,
    MARGIN,
    PAPER,
    PAPER_BATCHES,
    PAPER_EPOCHS,
    PAPER_PARAMETERS,
    PAPER_REDUCTION,
    PAPER_STAGES,
    PARAMETERS,
    SIMILAR,
)
from scripts.runs import (
    CHOICE,
    LEAST_VALIDATIONS,
    Run,
    Series,
    load_comparable,
    losses_of,
    plan_series,
    require_comparable,
    staged_losses,
    unequal_conditions,
)

LEAST_DF = 4  # a spread from fewer degrees of freedom decides nothing
TIMES = {"minutes", "speed"}  # what --timing replaces
WANTED = {  # the changes of a log loss that a conclusion asks for
    "lower": (-math.inf, 0),
    "higher": (0, math.inf),
    SIMILAR: (-math.log1p(MARGIN), math.log1p(MARGIN)),
}

Columns = dict[str, tuple[str, int, int]]  # quantity: heading, our digits, the paper's digits
TABLE1: Columns = {"n_batches": ("Batches", 0, 0), "zpr": ("ZPR %", 2, 2), "abl": ("ABL", 2, 2)}
TABLE2: Columns = {
    "zpr": ("ZPR %", 2, 2), "abl": ("ABL", 1, 2), "minutes": ("min/epoch", 3, 2),
    "vl1": ("VL1", 3, 3), "vl2": ("VL2", 3, 3), "vl3": ("VL3", 3, 3), "vl_avg": ("VLavg", 3, 3),
}  # fmt: skip
BEYOND: Columns = {
    "n_batches": ("batches", 1, 0), "total_length": ("sum of batch lengths", 0, 0),
    "speed": ("real frames/s", 0, 0), "memory": ("peak memory GiB", 2, 0),
    "masked3": ("masked VL3", 3, 0), "masked_avg": ("masked VLavg", 3, 0),
}  # fmt: skip
TABLE3: Columns = {
    "minutes": ("saved, min/epoch", 3, 2), "percent": ("saved %", 2, 2),
    "steps_percent": ("fewer decoder steps %", 2, 2),
}  # fmt: skip

# What the runs measured

Results = dict[str, dict[str, list[float]]]  # experiment: quantity: a value per seed


class Number(NamedTuple):
    """A mean over seeds with its standard error, nan where unknown, and the paper's number."""

    mean: float
    error: float
    paper: float | None = None

    def text(self, digits: int, paper_digits: int) -> str:
        """``mean ± standard error (paper)``."""
        text = "–" if math.isnan(self.mean) else f"{self.mean:,.{digits}f}"
        if not math.isnan(self.error):
            text += f" ± {self.error:,.{digits}f}"
        return text if self.paper is None else f"{text} ({self.paper:.{paper_digits}f})"

    def record(self, name: str) -> dict[str, str]:
        """The same for CSV: a column each, empty where unknown."""
        values = {name: self.mean, f"{name}_error": self.error}
        if self.paper is not None:
            values[f"{name}_paper"] = self.paper
        return {key: "" if math.isnan(v) else f"{v:.6g}" for key, v in values.items()}


def mean(results: Results, experiment: str, name: str, paper: float | None = None) -> Number:
    """An experiment's mean of a quantity, beside the paper's."""
    values = results.get(experiment, {}).get(name, [])
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Number(fmean(values) if values else math.nan, error, paper)


def reduction(results: Results, experiment: str, name: str, paper: float | None = None) -> Number:
    """The percentage by which a quantity is lower than RAND's, beside the paper's."""
    random, other = (mean(results, e, name) for e in ("RAND", experiment))
    ratio = other.mean / random.mean
    relative_error = math.hypot(other.error / other.mean, random.error / random.mean)
    return Number(100 * (1 - ratio), 100 * ratio * relative_error, paper)


# Tables


class Table:
    """Rows as Markdown shows them, and the same numbers as records for CSV."""

    def __init__(self, title: str, labels: list[str], columns: Columns, note: str = "") -> None:
        self.title, self.columns, self.note = title, columns, note
        self.rows = [[*labels, *(heading for heading, *_ in columns.values())]]
        self.records: list[dict[str, Any]] = []

    def add(self, labels: list[str], numbers: dict[str, Number], **record: Any) -> None:
        """A row of ``labels`` and those ``numbers`` that the table shows; a record of them all."""
        cells = [numbers[name].text(*digits) for name, (_, *digits) in self.columns.items()]
        self.rows.append(labels + cells)
        for name, number in numbers.items():
            record |= number.record(name)
        self.records.append(record)

    def markdown(self) -> str:
        head, *rows = self.rows
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"**{self.title}**\n\n{table}\n" + (f"\n*{self.note}*\n" if self.note else "")

    def write_csv(self, path: Path) -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.records[0])
            writer.writeheader()
            writer.writerows(self.records)


def table1(results: Results, runs: Sequence[Run]) -> Table:
    """Parameters selected, and the padding that they give (Sec. 3)."""
    title = "Table 1: parameters selected for the same padding (the paper's on LJSpeech)"
    table = Table(title, ["Batching", "Selected parameter", "Range"], TABLE1)
    ranges = {"SSB": "[0, ∞)", "BKT": "[batch size, clips)", "ATS": "[1, clips / batch size]"}
    for strategy, parameter in PARAMETERS.items():
        experiment, theirs = f"{strategy}-BR", PAPER_PARAMETERS[strategy]
        values = [run.settings[parameter] for run in runs if run.experiment == experiment]
        ours = values[0] if values else "–"
        paper = {"n_batches": PAPER_BATCHES[strategy], **PAPER[experiment]}
        table.add(
            [experiment, f"{parameter} {ours} ({theirs})", ranges[strategy]],
            {name: mean(results, experiment, name, paper[name]) for name in TABLE1},
            experiment=experiment,
            parameter=parameter,
            value=values[0] if values else "",
            value_paper=theirs,
        )
    return table


def table2(results: Results, series: Series, notes: dict[str, str]) -> tuple[Table, Table]:
    """Efficiency and validation losses; and what the paper has no column for."""
    stages = ", ".join(str(series.epochs[i]) for i in series.stages)
    losses = (
        f"VL1, VL2, VL3: validation loss after {stages} of {series.planned} epochs, each averaged "
        "with its neighbours; VLavg: mean between the first and the last."
    )
    note = (
        f"{notes.get('losses', losses)} {notes.get('times', 'min/epoch: median over epochs.')} "
        "Mean ± standard error over seeds; in parentheses the paper's, after "
        f"{', '.join(map(str, PAPER_STAGES))} of {PAPER_EPOCHS} epochs."
    )
    title = "Table 2: efficiency and validation losses (the paper's, on LJSpeech)"
    table = Table(title, ["Batching", "Seeds"], TABLE2, note)
    memory = "Peak memory: of the GPU, or on a CPU of the process, which varies as the times do."
    note = (
        f"Sum of batch lengths: decoder steps an epoch. {notes.get('memory', memory)} Masked: the "
        "loss over real frames only, which padding does not change."
    )
    beyond = Table("Table 2, beyond the paper", ["Batching"], BEYOND, note)
    for experiment in dict.fromkeys([*EXPERIMENTS, *results]):
        paper = PAPER.get(experiment, {})
        if paper:
            paper = {**paper, "n_batches": PAPER_BATCHES[experiment.removesuffix("-BR")]}
        names = TABLE2 | BEYOND
        numbers = {name: mean(results, experiment, name, paper.get(name)) for name in names}
        seeds = len(results.get(experiment, {}).get("abl", []))
        table.add([experiment, str(seeds)], numbers, experiment=experiment, seeds=seeds)
        beyond.add([experiment], numbers)
    return table, beyond


def table3(results: Results, notes: dict[str, str]) -> Table:
    """Training time saved against RAND, and how much of it fewer decoder steps predict."""
    title = "Table 3: training time reduction (the paper's, on one GTX 1080)"
    table = Table(title, ["From RAND to"], TABLE3, notes.get("times", ""))
    random, paper_random = mean(results, "RAND", "minutes"), PAPER["RAND"]["minutes"]
    for experiment in EXPERIMENTS[1:]:
        other = mean(results, experiment, "minutes")
        paper = paper_random - PAPER[experiment]["minutes"]
        percent = PAPER_REDUCTION.get(experiment, 100 * paper / paper_random)
        error = math.hypot(random.error, other.error)
        numbers = {
            "minutes": Number(random.mean - other.mean, error, paper),
            "percent": reduction(results, experiment, "minutes", percent),
            "steps_percent": reduction(results, experiment, "total_length"),
        }
        table.add([experiment], numbers, experiment=experiment)
    return table


def table4(results: Results) -> Table:
    """A/B comparisons of VL3."""
    labels = ["", "From", "VL3", "To", "VL3", "Reduction %", "Paper's %"]
    note = (
        "In parentheses: beside a loss the paper's, beside a reduction (of the geometric mean) "
        "its 95 % interval by itself, from the spread between seeds pooled over all experiments."
    )
    table = Table("Table 4: A/B comparisons of VL3", labels, {}, note)
    evidence = Evidence(results, "vl3")
    for part, pair in [(part, pair) for part, pairs in COMPARISONS.items() for pair in pairs]:
        before, after = (mean(results, e, "vl3", PAPER[e]["vl3"]) for e in pair.split(" → "))
        changes = in_percent(*evidence.contrast(pair))
        ours, high, low = ("" if math.isnan(x) else f"{-x:.2f}" for x in changes)
        interval = f" ({low} to {high})" if low else ""
        record = dict(zip(("from", "to"), pair.split(" → "), strict=True))
        record |= {"reduction_percent": ours, "low": low, "high": high}
        record["reduction_percent_paper"] = f"{100 * (1 - after.paper / before.paper):.2f}"
        row = [part, record["from"], before.text(3, 3), record["to"], after.text(3, 3)]
        row += [(ours or "–") + interval, record["reduction_percent_paper"]]
        table.add(row, {}, part=part, **record)
    return table


# Conclusions


def weights_of(check: str) -> dict[str, int]:
    """The weights of log losses whose sum is what a check of CONCLUSIONS is about."""
    experiments = re.split(r" → |\) against \(", check.strip("()"))
    return dict(zip(experiments, (-1, 1, 1, -1)[: len(experiments)], strict=True))


class Evidence:
    """Compares the experiments' losses, measured against the spread between seeds.

    The logarithm of a loss scatters equally in every experiment. So one standard deviation is
    pooled over all that have two seeds or more, and those with one seed can be compared too.
    """

    def __init__(self, results: Results, name: str) -> None:
        losses = {e: values[name] for e, values in results.items() if values.get(name)}
        self.logs = {e: [math.log(loss) for loss in values] for e, values in losses.items()}
        self.df = sum(len(logs) - 1 for logs in self.logs.values())
        squares = sum((x - fmean(logs)) ** 2 for logs in self.logs.values() for x in logs)
        self.sd = math.sqrt(squares / self.df) if self.df else math.nan

    def contrast(self, check: str, n_checks: int = 1) -> tuple[float, float]:
        """The change of the log loss, and half its 95 % interval; nan where unknown.

        The intervals of ``n_checks`` checks all hold at once (Bonferroni).
        """
        from scipy.special import stdtrit  # Student's quantile

        weights = weights_of(check)
        if not set(weights) <= set(self.logs):
            return math.nan, math.nan
        estimate = sum(weight * fmean(self.logs[name]) for name, weight in weights.items())
        error = self.sd * math.sqrt(sum(1 / len(self.logs[name]) for name in weights))
        quantile = stdtrit(self.df, 1 - 0.025 / n_checks) if self.df else math.nan
        return estimate, float(quantile * error)


def judge(middle: float, half: float, wanted: str) -> str:
    """Whether a 95 % interval says that a check "holds" or "fails", or leaves it "open"."""
    low, high = WANTED[wanted]
    if low < middle - half and middle + half < high:
        return "holds"
    return "fails" if middle + half < low or high < middle - half else "open"


def verdict(outcomes: Sequence[str], missing: Sequence[str]) -> str:
    """What a conclusion's checks say of it; ``missing``: the experiments that it lacks."""
    if missing:
        return f"**not run** (needs {', '.join(missing)})"
    counts = Counter(outcomes)
    answer = "not decidable at this scale" if counts["open"] else "supported"
    if counts["fails"]:
        answer = "contradicted"
    words = [f"{counts[word]} {word}" for word in ("holds", "fails", "open") if counts[word]]
    return f"**{answer}** ({', '.join(words)})"


def in_percent(middle: float, half: float) -> list[float]:
    """A change of the log loss as one of the loss, and the ends of its interval."""
    return [100 * math.expm1(x) for x in (middle, middle - half, middle + half)]


def percent_text(middle: float, half: float) -> str:
    change, low, high = (f"{x:+.1f}" for x in in_percent(middle, half))
    if math.isnan(half):
        return "–" if math.isnan(middle) else change
    return f"{change} ({low} to {high})"


def loss_after(epochs: float, curve: Sequence[float], series: Series) -> float:
    """A curve's loss after ``epochs``, which may lie between validations.

    It is averaged with the loss one validation before, as is VL3, which has no next one.
    """
    import numpy as np

    interval = series.epochs[-1] - series.epochs[-2] if len(series.epochs) > 1 else 0
    return fmean(np.interp((epochs - interval, epochs), series.epochs, curve))


def conclude(results: Results, runs: Sequence[Run], series: Series, notes: dict[str, str]) -> str:
    """The report on the conclusions, as Markdown."""
    ours = {name: Evidence(results, name) for name in ("vl3", "vl_avg")}
    paper = {e: {name: [row[name]] for name in ours} for e, row in PAPER.items()}
    papers = {name: Evidence(paper, name) for name in ours}
    sd, df = ours["vl3"].sd, ours["vl3"].df
    # Added once the spread is pooled: these are RAND's own runs again.
    curves = [losses_of(run, series) for run in runs if run.experiment == "RAND"]
    curves = [curve for curve in curves if len(curve) == len(series.epochs)]
    for experiment in results:
        ratio = mean(results, experiment, "minutes").mean / mean(results, "RAND", "minutes").mean
        if curves and not math.isnan(ratio):
            epochs = min(ratio, 1) * series.planned  # of RAND when the experiment has ended
            logs = [math.log(loss_after(epochs, curve, series)) for curve in curves]
            ours["vl3"].logs[f"RAND in {experiment}'s time"] = logs
    seeds = "unknown with so few seeds"
    if df >= LEAST_DF:
        seeds = f"of VL3 {sd:.1%} sd, pooled over experiments, {df} degrees of freedom"
    remarks = {
        1: " That LRF tunes the padding more smoothly is Figure 2 (plot_batching.py).",
        2: " RAND in another's time: its loss when the other has ended.",
    }
    if not math.isnan(reduction(results, "SSB-DBS-BR", "minutes").mean):
        remarks[3] = " The time that it saves is in Table 3."
    lines = [
        "**The paper's conclusions**\n",
        "Each rests on comparisons of VL3, as the paper's Table 4 does; VLavg stands beside. In "
        "parentheses: intervals by the spread between seeds "
        f"({seeds}), which cover all comparisons of a conclusion at once with 95 %. A comparison "
        "holds or fails where its interval leaves no other answer, and is open otherwise. A "
        "conclusion needs all of its own to be supported; one that fails contradicts it. Losses "
        f"{SIMILAR} are called similar.\n",
        *(f"{notes[name]}\n" for name in ("losses", "times") if name in notes),
    ]
    for number, (claim, checks) in enumerate(CONCLUSIONS.items(), start=1):
        rows, outcomes = [], []
        for check, wanted in checks.items():
            cells = [check, wanted]
            for name in ours:
                cells.append(percent_text(*ours[name].contrast(check, len(checks))))
                cells.append(percent_text(*papers[name].contrast(check)))
            interval = ours["vl3"].contrast(check, len(checks))
            outcomes.append(judge(*interval, wanted) if df >= LEAST_DF else "open")
            rows.append(f"   | {' | '.join([*cells, outcomes[-1]])} |")
        needed = {name for check in checks for name in weights_of(check)}
        missing = [name for name in EXPERIMENTS if name in needed and name not in results]
        lines += [
            f"{number}. {claim}: {verdict(outcomes, missing)}.{remarks.get(number, '')}\n",
            "   | From → to | wanted | VL3 % | paper's | VLavg % | paper's | by VL3 |",
            "   |---|---|---:|---:|---:|---:|---|",
            *rows,
            "",
        ]
    return "\n".join(lines)


# The program


def parse_args(description: str, output: str) -> argparse.Namespace:
    """The command line that tables.py and figures.py share."""
    parser = ArgumentParser(description=f"{description}, from the records of runs, finished or not")
    parser.add_argument("runs", nargs="+", type=Path, help="outputs of run_all.sh or train.py")
    parser.add_argument(
        "--timing", type=Path, metavar="RUNS",
        help="take the times from these runs, if the others shared their machine",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help=f"where to write (default: RUNS/{output})"
    )
    args = parser.parse_args()
    args.output = args.output or args.runs[0] / output
    return args


def read_results(args: argparse.Namespace) -> tuple[list[Run], Series, Results, dict[str, str]]:
    """The runs that ``args`` name, their validations, their results so far, and notes.

    The notes say what is left out of the results, and why: "losses", "times", "memory".
    """
    runs = timed = load_comparable(args.runs)
    series, notes = plan_series(runs), {}
    if args.timing:
        timed = load_comparable([args.timing])
        require_comparable(runs[0], timed[0], CHOICE)
    if len(series.epochs) < LEAST_VALIDATIONS:
        notes["losses"] = (
            f"VL1, VL2, VL3 and VLavg are left out: with {LEAST_VALIDATIONS - 1} validations or "
            f"fewer (here {len(series.epochs)}), their averages would be nearly the same; set more "
            "epochs, or a smaller epochs_per_validation."
        )
    if reason := unequal_conditions(timed):
        notes["times"] = f"Times are not compared: {reason}."
    if reason := unequal_conditions(runs):
        notes["memory"] = f"Peak memory is not compared: {reason}."
    results = {run.experiment: defaultdict(list) for run in [*runs, *timed]}
    for run in runs:
        values = run.averages()
        if "losses" not in notes:
            values |= staged_losses(run, series)
        if "memory" in notes:
            values.pop("memory", None)
        for name in set(values) - TIMES:
            results[run.experiment][name].append(values[name])
    for run in [] if "times" in notes else timed:
        values = run.averages()
        for name in set(values) & TIMES:
            results[run.experiment][name].append(values[name])
    make_folder(args.output)
    return runs, series, results, notes


def missing_parts(runs: Sequence[Run], series: Series) -> list[str]:
    """What the tables still lack, a line each."""
    present = {run.experiment for run in runs}
    absent = ", ".join(name for name in EXPERIMENTS if name not in present)
    lines = [f"no run of {absent}"] if absent else []
    for run in runs:
        if not all(math.isfinite(record["loss"]) for record in run.validations):
            lines.append(f"{run.path}: has diverged, and is left out")
        elif len(losses_of(run, series)) < len(series.epochs):
            lines.append(f"{run.path}: {len(run.epochs)} of {series.planned} epochs")
    return lines


def main() -> None:
    args = parse_args("Fill the paper's Tables 1-4, and judge its five conclusions", "tables")
    runs, series, results, notes = read_results(args)
    table, beyond = table2(results, series, notes)
    tables = [table1(results, runs), table, table3(results, notes), table4(results)]
    texts = {f"table{number}": table.markdown() for number, table in enumerate(tables, start=1)}
    texts["table2"] += f"\n{beyond.markdown()}"
    texts["conclusions"] = conclude(results, runs, series, notes)
    try:
        for name, text in texts.items():
            (args.output / f"{name}.md").write_text(text, encoding="utf-8")
        for number, table in enumerate(tables, start=1):
            table.write_csv(args.output / f"table{number}.csv")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from None
    print("\n".join(texts.values()))
    if lines := missing_parts(runs, series):
        print("Missing:\n  " + "\n  ".join(lines) + "\n")
    print(f"wrote {args.output}/table1-4 as .md and .csv, and conclusions.md")


if __name__ == "__main__":
    exit_on_user_error(main)
