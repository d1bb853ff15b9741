"""Fill the paper's Tables 1-4 and judge its five conclusions, from what runs of train.py recorded.

    python scripts/tables.py runs/table2                       # the output of run_all.sh
    python scripts/tables.py runs/seed0 runs/seed1 --output runs/both

Prints them, and writes each as Markdown. Unfinished runs count as far as they have got; what is
still missing is listed.
"""

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from files import make_folder
from scripts import paper
from scripts.paper import EXPERIMENTS, PAPER
from scripts.runs import (
    CHOICE,
    LEAST_VALIDATIONS,
    Run,
    inequality,
    load_comparable,
    losses_of,
    staged_losses,
    stages,
    unequal_conditions,
    validated_epochs,
)

# Quantities of the tables, and our digits. The paper's:
PAPER_DIGITS = {"n_batches": 0, "zpr": 2, "abl": 2, "minutes": 2}  # others: 3
TABLE1 = {"n_batches": 0, "zpr": 2, "abl": 2}
TABLE2 = {"zpr": 2, "abl": 1, "minutes": 3, "vl1": 3, "vl2": 3, "vl3": 3, "vl_avg": 3}
BEYOND = {"n_batches": 1, "total_length": 0, "frames_per_second": 0, "peak_memory_gib": 2}
BEYOND |= {"masked3": 3, "masked_avg": 3}
TIMES = {"minutes", "frames_per_second"}  # what --timing replaces
WANTED = {  # the changes of a loss that a conclusion asks for, in percent
    "lower": (-math.inf, 0),
    "higher": (0, math.inf),
    paper.SIMILAR: (100 / (1 + paper.MARGIN) - 100, 100 * paper.MARGIN),
}
LEAST_DF = 4  # a spread from fewer degrees of freedom decides nothing

Results = dict[str, dict[str, list[float]]]  # experiment: quantity: a value per seed


def mean(results: Results, experiment: str, name: str) -> tuple[float, float]:
    """The mean over seeds and its standard error; nan where unknown."""
    values = results.get(experiment, {}).get(name, [])
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return fmean(values) if values else math.nan, error


def reduction(results: Results, experiment: str, name: str) -> tuple[float, float]:
    """The percentage by which a quantity is lower than RAND's, and its standard error."""
    random, random_error = mean(results, "RAND", name)
    other, error = mean(results, experiment, name)
    relative_error = math.hypot(error / other, random_error / random)
    return 100 * (1 - other / random), 100 * other / random * relative_error


def table(title: str, head: str, rows: Iterable[Sequence[str]], note: str = "") -> str:
    rule = "| --- |" + " ---: |" * head.count(" | ")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    text = "\n".join([f"**{title}**\n", f"| {head} |", rule, *lines, ""])
    return f"{text}\n*{note}*\n" if note else text


def cell(number: tuple[float, float], digits: int, theirs: str = "") -> str:
    """``mean ± standard error (paper's)``."""
    text = "–" if math.isnan(number[0]) else f"{number[0]:,.{digits}f}"
    if not math.isnan(number[1]):
        text += f" ± {number[1]:,.{digits}f}"
    return f"{text} ({theirs})" if theirs else text


def cells(results: Results, experiment: str, quantities: dict[str, int]) -> list[str]:
    """An experiment's means, each beside the paper's, where it has one."""
    theirs = {}
    for name, value in PAPER.get(experiment, {}).items():
        theirs[name] = f"{value:.{PAPER_DIGITS.get(name, 3)}f}"
    return [
        cell(mean(results, experiment, name), digits, theirs.get(name, ""))
        for name, digits in quantities.items()
    ]


def table1(results: Results, runs: Sequence[Run]) -> str:
    """Parameters selected, and the padding that they give (Sec. 3)."""
    rows = []
    ranges = {"SSB": "[0, ∞)", "BKT": "[batch size, clips)", "ATS": "[1, clips / batch size]"}
    for strategy, parameter in paper.PARAMETERS.items():
        name, theirs = f"{strategy}-BR", paper.PAPER_PARAMETERS[strategy]
        ours = next((run.settings[parameter] for run in runs if run.experiment == name), "–")
        selected = [name, f"{parameter} {ours} ({theirs})", ranges[strategy]]
        rows.append(selected + cells(results, name, TABLE1))
    title = "Table 1: parameters selected for the same padding (the paper's on LJSpeech)"
    return table(title, "Batching | Selected parameter | Range | Batches | ZPR % | ABL", rows)


def table2(results: Results, epochs: Sequence[int], notes: dict[str, str]) -> str:
    """Efficiency and validation losses; and what the paper has no column for."""
    seeds = {name: len(values["abl"]) for name, values in results.items()}
    names = dict.fromkeys([*EXPERIMENTS, *results])
    rows = [[e, str(seeds.get(e, 0)), *cells(results, e, TABLE2)] for e in names]
    losses = (
        f"VL1, VL2, VL3: validation loss after {', '.join(str(epochs[i]) for i in stages(epochs))} "
        f"of {epochs[-1]} epochs, each averaged with its neighbours; VLavg: mean between the first "
        "and the last."
    )
    note = (
        f"{notes.get('losses', losses)} {notes.get('times', 'min/epoch: median over epochs.')} "
        "Mean ± standard error over seeds; in parentheses the paper's, after "
        f"{', '.join(map(str, paper.PAPER_STAGES))} of {paper.PAPER_EPOCHS} epochs."
    )
    title = "Table 2: efficiency and validation losses (the paper's, on LJSpeech)"
    head = "Batching | Seeds | ZPR % | ABL | min/epoch | VL1 | VL2 | VL3 | VLavg"
    memory = "Peak memory: of the GPU, or on a CPU of the process, which varies as the times do."
    beyond_head = (
        "Batching | batches | sum of batch lengths | real frames/s | peak memory GiB | masked VL3 "
        "| masked VLavg"
    )
    beyond_note = (
        f"Sum of batch lengths: decoder steps an epoch. {notes.get('memory', memory)} Masked: the "
        "loss over real frames only, which padding does not change."
    )
    beyond = [[e, *cells(results, e, BEYOND)] for e in names]
    beyond = table("Table 2, beyond the paper", beyond_head, beyond, beyond_note)
    return f"{table(title, head, rows, note)}\n{beyond}"


def table3(results: Results, notes: dict[str, str]) -> str:
    """Training time saved against RAND, and how much of it fewer decoder steps predict."""
    rows = []
    random, random_error = mean(results, "RAND", "minutes")
    for name in EXPERIMENTS[1:]:
        other, error = mean(results, name, "minutes")
        saved = random - other, math.hypot(random_error, error)
        theirs = PAPER["RAND"]["minutes"] - PAPER[name]["minutes"]
        percent = paper.PAPER_REDUCTION.get(name, 100 * theirs / PAPER["RAND"]["minutes"])
        time = cell(reduction(results, name, "minutes"), 2, f"{percent:.2f}")
        steps = cell(reduction(results, name, "total_length"), 2)
        rows.append([name, cell(saved, 3, f"{theirs:.2f}"), time, steps])
    title = "Table 3: training time reduction (the paper's, on one GTX 1080)"
    head = "From RAND to | saved, min/epoch | saved % | fewer decoder steps %"
    return table(title, head, rows, notes.get("times", ""))


def table4(results: Results) -> str:
    """A/B comparisons of VL3."""
    rows, evidence = [], Evidence(results, "vl3")
    for part, pair in [(part, pair) for part, pairs in paper.COMPARISONS.items() for pair in pairs]:
        before, after = ([e, *cells(results, e, {"vl3": 3})] for e in pair.split(" → "))
        change, low, high = evidence.contrast(pair)
        theirs = 100 * (1 - PAPER[after[0]]["vl3"] / PAPER[before[0]]["vl3"])
        ours = with_interval(-change, -high, -low, ".2f")
        rows.append([part, *before, *after, ours, f"{theirs:.2f}"])
    head = " | From | VL3 | To | VL3 | Reduction % | Paper's %"
    note = (
        "In parentheses: beside a loss the paper's, beside a reduction (of the geometric mean) "
        "its 95 % interval by itself, from the spread between seeds pooled over all experiments."
    )
    return table("Table 4: A/B comparisons of VL3", head, rows, note)


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

    def contrast(self, check: str, n_checks: int = 1) -> list[float]:
        """The change of the loss that a check of CONCLUSIONS is about, and the ends of its 95 %
        interval, in percent; nan where unknown.

        The intervals of ``n_checks`` checks all hold at once (Bonferroni).
        """
        from scipy.special import stdtrit  # Student's quantile

        names = re.split(r" → |\) against \(", check.strip("()"))
        if not set(names) <= set(self.logs):
            return [math.nan] * 3
        means = [fmean(self.logs[name]) for name in names]
        change = sum(w * mean for w, mean in zip((-1, 1, 1, -1), means, strict=False))
        error = self.sd * math.sqrt(sum(1 / len(self.logs[name]) for name in names))
        half = error * float(stdtrit(self.df, 1 - 0.025 / n_checks)) if self.df else math.nan
        return [100 * math.expm1(x) for x in (change, change - half, change + half)]


def with_interval(change: float, low: float, high: float, form: str) -> str:
    if math.isnan(low):
        return "–" if math.isnan(change) else f"{change:{form}}"
    return f"{change:{form}} ({low:{form}} to {high:{form}})"


def judge(low: float, high: float, wanted: str) -> str:
    """Whether an interval says that a check "holds" or "fails", or leaves it "open"."""
    least, most = WANTED[wanted]
    if least < low and high < most:
        return "holds"
    return "fails" if high < least or low > most else "open"


def verdict(outcomes: Sequence[str], missing: Sequence[str]) -> str:
    """What a conclusion's checks say of it; ``missing``: the experiments that it lacks."""
    if missing:
        return f"**not run** (needs {', '.join(missing)})"
    answer = "not decidable at this scale" if "open" in outcomes else "supported"
    if "fails" in outcomes:
        answer = "contradicted"
    words = [word for word in ("holds", "fails", "open") if word in outcomes]
    return f"**{answer}** ({', '.join(f'{outcomes.count(word)} {word}' for word in words)})"


def conclude(
    results: Results, runs: Sequence[Run], epochs: Sequence[int], notes: dict[str, str]
) -> str:
    """The report on the conclusions, as Markdown."""
    import numpy as np

    theirs = {e: {name: [value] for name, value in row.items()} for e, row in PAPER.items()}
    vl3, *others = [Evidence(r, n) for n in ("vl3", "vl_avg") for r in (results, theirs)]
    seeds = "unknown with so few seeds"
    if vl3.df >= LEAST_DF:
        seeds = f"of VL3 {vl3.sd:.1%} sd, pooled over experiments, {vl3.df} degrees of freedom"
    # Added once the spread is pooled: these are RAND's own runs again.
    curves = [losses_of(run, epochs) for run in runs if run.experiment == "RAND"]
    curves = [curve for curve in curves if len(curve) == len(epochs)]
    random, _ = mean(results, "RAND", "minutes")
    for name in results:
        minutes, _ = mean(results, name, "minutes")
        if curves and not math.isnan(minutes / random):
            end = min(minutes / random, 1) * epochs[-1]  # RAND's epochs when the other has ended
            # Averaged with the loss one validation before, as is VL3, which has no next one.
            times = end + epochs[-2:][0] - epochs[-1], end
            logs = [math.log(fmean(np.interp(times, epochs, curve))) for curve in curves]
            vl3.logs[f"RAND in {name}'s time"] = logs
    lines = [
        "**The paper's conclusions**\n",
        "Each rests on comparisons of VL3, as the paper's Table 4 does; VLavg stands beside. In "
        f"parentheses: intervals by the spread between seeds ({seeds}), which cover all "
        "comparisons of a conclusion at once with 95 %. A comparison holds or fails where its "
        "interval leaves no other answer, and is open otherwise. A conclusion needs all of its own "
        "to be supported; one that fails contradicts it. Losses "
        f"{paper.SIMILAR} are called similar.\n",
        *(f"{notes[name]}\n" for name in ("losses", "times") if name in notes),
    ]
    for number, (claim, wishes) in enumerate(paper.CONCLUSIONS.items(), start=1):
        checks = [(check, wanted) for wanted, some in wishes.items() for check in some]
        rows, outcomes = [], []
        for check, wanted in checks:
            ours = vl3.contrast(check, len(checks))
            outcomes.append(judge(*ours[1:], wanted) if vl3.df >= LEAST_DF else "open")
            n_checks = (1, len(checks), 1)  # the paper's have no intervals
            changes = [ours, *(e.contrast(check, n) for e, n in zip(others, n_checks, strict=True))]
            texts = [with_interval(*change, "+.1f") for change in changes]
            rows.append(f"   | {' | '.join([check, wanted, *texts, outcomes[-1]])} |")
        needed = re.findall(r"[A-Z][A-Z-]+", str(checks))
        missing = [name for name in EXPERIMENTS if name in needed and name not in results]
        lines += [
            f"{number}. {claim.format(verdict(outcomes, missing))}\n",
            "   | From → to | wanted | VL3 % | paper's | VLavg % | paper's | by VL3 |",
            "   |---|---|---:|---:|---:|---:|---|",
            *rows,
            "",
        ]
    return "\n".join(lines)


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


def read_results(args: argparse.Namespace) -> tuple[list[Run], list[int], Results, dict[str, str]]:
    """The runs that ``args`` name, after which epochs they validate, their results, and notes.

    The notes say what is left out of the results, and why: "losses", "times", "memory".
    """
    runs = timed = load_comparable(args.runs)
    if args.timing:
        timed = load_comparable([args.timing])
        if reason := inequality(runs[0], timed[0], {"seed", *CHOICE}):
            names = f"{runs[0].path} and --timing {timed[0].path}"
            raise UserError(f"{names}: {reason}; time runs of the same settings")
    epochs, notes, untimed = validated_epochs(runs), {}, {*TABLE2, *BEYOND} - TIMES
    if len(epochs) < LEAST_VALIDATIONS:
        notes["losses"] = (
            f"VL1, VL2, VL3 and VLavg are left out: with {LEAST_VALIDATIONS - 1} validations or "
            f"fewer (here {len(epochs)}), their averages would be nearly the same; set more "
            "epochs, or a smaller epochs_per_validation."
        )
    if reason := unequal_conditions(timed):
        notes["times"] = f"Times are not compared: {reason}."
    if reason := unequal_conditions(runs):
        notes["memory"] = f"Peak memory is not compared: {reason}."
        untimed.remove("peak_memory_gib")
    results = {run.experiment: defaultdict(list) for run in [*runs, *timed]}
    for source, names in ((runs, untimed), ([] if "times" in notes else timed, TIMES)):
        for run in source:
            values = run.averages() | staged_losses(run, epochs)
            for name in names & values.keys():
                results[run.experiment][name].append(values[name])
    make_folder(args.output)
    return runs, epochs, results, notes


def main() -> None:
    args = parse_args("Fill the paper's Tables 1-4, and judge its five conclusions", "tables")
    runs, epochs, results, notes = read_results(args)
    texts = {
        "table1": table1(results, runs),
        "table2": table2(results, epochs, notes),
        "table3": table3(results, notes),
        "table4": table4(results),
        "conclusions": conclude(results, runs, epochs, notes),
    }
    for name, text in texts.items():
        (args.output / f"{name}.md").write_text(text, encoding="utf-8")
    print("\n".join(texts.values()))
    present = {run.experiment for run in runs}
    absent = [name for name in EXPERIMENTS if name not in present]
    missing = [f"no run of {', '.join(absent)}"] if absent else []
    for run in runs:
        done, losses = len(run.epochs), losses_of(run, epochs)
        if len(losses) < len(epochs):
            diverged = not all(math.isfinite(record["loss"]) for record in run.validations)
            state = (
                "has diverged, and is left out" if diverged else f"{done} of {epochs[-1]} epochs"
            )
            missing.append(f"{run.path}: {state}")
    if missing:
        print("Missing:\n  " + "\n  ".join(missing) + "\n")
    print(f"wrote table1-4.md and conclusions.md to {args.output}")


if __name__ == "__main__":
    exit_on_user_error(main)
