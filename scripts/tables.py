"""Fill the paper's Tables 1-4 and one more, and judge its five conclusions, from runs' records.

    python scripts/tables.py runs/table2                       # the output of run_all.sh
    python scripts/tables.py runs/seed0 runs/seed1 --output runs/both
    python scripts/tables.py runs/sweep_batch_size --sweep batch_size     # one table, of a sweep

Prints them, and writes each as Markdown. Unfinished runs count as far as they have got; what is
still missing is listed.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import exit_on_user_error
from scripts import paper
from scripts.paper import EXPERIMENTS, PAPER
from scripts.runs import RESOURCES, Results, Values, parse_args, stages

# Columns of the tables: the quantity, and our digits.
TABLE1 = {"Batches": ("n_batches", 0), "ZPR %": ("zpr", 2), "ABL": ("abl", 2)}
TABLE2 = {"ZPR %": ("zpr", 2), "ABL": ("abl", 1), "min/epoch": ("minutes", 3)}
TABLE2 |= {"VL1": ("vl1", 3), "VL2": ("vl2", 3), "VL3": ("vl3", 3), "VLavg": ("vl_avg", 3)}
BEYOND = {"batches": ("n_batches", 1), "sum of batch lengths": ("total_length", 0)}
BEYOND |= {"real frames/s": ("frames_per_second", 0), "peak memory GiB": ("peak_memory_gib", 2)}
BEYOND |= {"masked VL3": ("masked3", 3), "masked VLavg": ("masked_avg", 3)}
SWEEP = {"batches": ("n_batches", 1), "steps": ("taken", 0), "ZPR %": ("zpr", 2)}
WANTED = {  # the changes of a loss that a conclusion asks for, in percent
    "lower": (-math.inf, 0),
    "higher": (0, math.inf),
    paper.SIMILAR: (100 / (1 + paper.MARGIN) - 100, 100 * paper.MARGIN),
}
LEAST_DF = 4  # a spread from fewer degrees of freedom decides nothing
# The paper's losses; it has trained each experiment once.
THEIRS = {e: {name: {0: value} for name, value in row.items()} for e, row in PAPER.items()}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    text = "\n".join([f"**{title}**\n", *lines, ""])
    return f"{text}\n*{note}*\n" if note else text


def cell(number: tuple[float, float], digits: int, theirs: str = "") -> str:
    """``mean ± standard error (paper's)``."""
    mean, error = ("" if math.isnan(x) else f"{x:,.{digits}f}" for x in number)
    return (mean or "–") + (f" ± {error}" if error else "") + (f" ({theirs})" if theirs else "")


def cells(results: Results, experiment: str, columns: dict[str, tuple[str, int]]) -> list[str]:
    """An experiment's means, each beside the paper's, where it has one."""
    row = PAPER.get(experiment, {})
    theirs = {name: f"{value:.{paper.DIGITS[name]}f}" for name, value in row.items()}
    return [
        cell(results.mean(experiment, name), digits, theirs.get(name, ""))
        for name, digits in columns.values()
    ]


def table1(results: Results) -> str:
    """Parameters selected, and the padding that they give (Sec. 3)."""
    rows = []
    ranges = {"SSB": "[0, ∞)", "BKT": "[batch size, clips)", "ATS": "[1, clips / batch size]"}
    for strategy, parameter in paper.PARAMETERS.items():
        name, theirs = f"{strategy}-BR", paper.PAPER_PARAMETERS[strategy]
        ours = next((r.settings[parameter] for r in results.runs if r.experiment == name), "–")
        selected = f"{parameter} {ours} ({theirs})"
        rows.append([name, selected, ranges[strategy], *cells(results, name, TABLE1)])
    title = "Table 1: parameters selected for the same padding (the paper's on LJSpeech)"
    return table(title, ["Batching", "Selected parameter", "Range", *TABLE1], rows)


def table2(results: Results) -> str:
    """Efficiency and validation losses; and what the paper has no column for."""
    epochs, notes = results.epochs, results.notes
    rows, beyond = [], []
    for name in dict.fromkeys([*EXPERIMENTS, *results.values]):
        seeds = len(results.values.get(name, {}).get("abl", []))
        rows.append([name, str(seeds), *cells(results, name, TABLE2)])
        beyond.append([name, *cells(results, name, BEYOND)])
    stage_epochs = ", ".join(str(epochs[i]) for i in stages(epochs, results.start))
    losses = (
        f"VL1, VL2, VL3: validation loss after {stage_epochs} of {epochs[-1]} epochs, each "
        "averaged with its neighbours; VLavg: mean between the first and the last."
    )
    note = (
        f"{notes.get('losses', losses)} {notes.get('times', 'min/epoch: median over epochs.')} "
        "Mean ± standard error over seeds; in parentheses the paper's, after "
        f"{', '.join(map(str, paper.PAPER_STAGES))} of {paper.PAPER_EPOCHS} epochs."
    )
    memory = "Peak memory: the GPU's, or without one the process's."
    beyond_note = (
        f"Sum of batch lengths: decoder steps an epoch. {notes.get('memory', memory)} Masked: the "
        "loss over real frames only, which padding does not change."
    )
    title = "Table 2: efficiency and validation losses (the paper's, on LJSpeech)"
    first = table(title, ["Batching", "Seeds", *TABLE2], rows, note)
    second = table("Table 2, beyond the paper", ["Batching", *BEYOND], beyond, beyond_note)
    return f"{first}\n{second}"


def table3(results: Results) -> str:
    """Training time saved against RAND, beside the decoder steps and padded frames saved."""
    rows = []
    random, random_error = results.mean("RAND", "minutes")
    for name in EXPERIMENTS[1:]:
        other, error = results.mean(name, "minutes")
        saved = random - other, math.hypot(random_error, error)
        theirs = PAPER["RAND"]["minutes"] - PAPER[name]["minutes"]
        percent = paper.PAPER_REDUCTION.get(name, 100 * theirs / PAPER["RAND"]["minutes"])
        time = cell(results.reduction(name, "minutes"), 2, f"{percent:.2f}")
        work = (cell(results.reduction(name, what), 2) for what in ("total_length", "abl"))
        rows.append([name, cell(saved, 3, f"{theirs:.2f}"), time, *work])
    title = "Table 3: training time reduction (the paper's, on one GTX 1080)"
    head = ["From RAND to", "saved, min/epoch", "saved %", "fewer decoder steps %"]
    head += ["fewer padded frames %"]
    return table(title, head, rows, results.notes.get("times", ""))


def table4(results: Results) -> str:
    """A/B comparisons of a loss."""
    evidence, rows = compared(results), []
    columns = {name: (e.quantity, 3) for name, e in evidence.items()}
    theirs = Evidence(THEIRS, results.judged("vl"))
    for part, pairs in paper.COMPARISONS.items():
        for pair in pairs:
            names = pair.split(" → ")
            row = [part, *(text for e in names for text in (e, *cells(results, e, columns)))]
            for ours in evidence.values():
                change, low, high = ours.contrast(pair)
                row.append(with_interval(-change, -high, -low, ".2f"))
            rows.append([*row, f"{-theirs.contrast(pair)[0]:.2f}"])
    reductions = [f"Reduction of {name} %" for name in evidence]
    head = ["", "From", *evidence, "To", *evidence, *reductions, "Paper's %"]
    note = (
        "In parentheses: the paper's loss, and each reduction's own 95 % interval, from "
        "differences paired by seed."
    )
    return table(f"Table 4: A/B comparisons of {' and '.join(evidence)}", head, rows, note)


def table5(results: Results) -> str:
    """RAND against the others after the same epochs, updates and time, which the paper lacks."""
    evidence, rows = compared(results), []
    for name in EXPERIMENTS[1:]:
        randoms = "RAND", f"RAND in {name}'s updates", f"RAND in {name}'s time"
        changes = (
            e.contrast(f"{random} → {name}") for e in evidence.values() for random in randoms
        )
        rows.append([name, *(with_interval(*change, "+.1f") for change in changes)])
    head = [f"{loss} %, same {same}" for loss in evidence for same in ("epochs", "updates", "time")]
    title = "Table 5: change of the loss from RAND after the same epochs, updates and time"
    return table(title, ["From RAND to", *head], rows, results.notes.get("times", ""))


def sweep(results: Results) -> str:
    """Efficiency, and losses after equal epochs, steps and times, of every value of a setting."""
    columns, rows = dict(SWEEP), []
    for unit, resource in RESOURCES.items():
        amount, losses = results.at_equal(resource)
        digits = 2 if unit == "minutes" else 0
        head = f"loss after {cell((amount, math.nan), digits)} {unit}"
        columns[head] = (head, 3)
        for experiment, row in results.values.items():
            row[head] = losses[experiment]
    for experiment, row in results.values.items():
        row["taken"] = {0: results.taken(experiment, "n_batches")[-1]}
        name, _, value = experiment.partition(f",{results.sweep}=")
        rows.append([name, value, str(len(row["abl"])), *cells(results, experiment, columns)])
    times = "Minutes: the median of an epoch × epochs, without validation."
    note = (
        "Batches of an epoch, steps of all. Loss: the masked validation loss, which padding does "
        "not change, after the most epochs, steps and minutes that every finished run has taken "
        "since its start; interpolated between two validations, left out before the first. "
        f"{results.notes.get('times', times)} Mean ± standard error over seeds."
    )
    title = f"Sweep of {results.sweep}: losses after the same epochs, steps and time"
    return table(title, ["Batching", results.sweep, "Seeds", *columns], rows, note)


class Evidence:
    """Compares the experiments' losses, seed by seed.

    Runs of one seed share their start, or at least their first weights. So the logarithm of a loss
    is an effect of the experiment, plus an effect of the seed, plus a residual (a randomised block
    design). The residuals of all runs together give one standard deviation.
    """

    def __init__(self, values: Values, quantity: str) -> None:
        self.quantity = quantity
        self.losses = {e: row[quantity] for e, row in values.items() if row.get(quantity)}
        logs = {(e, s): math.log(x) for e, row in self.losses.items() for s, x in row.items()}
        parts = sorted({part for key in logs for part in key}, key=str)
        design = np.array([[float(part in key) for part in parts] for key in logs])
        self.sd, self.df = math.nan, 0
        if logs:
            y = np.array(list(logs.values()))
            fit, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
            self.df = len(y) - int(rank)
        if self.df:
            self.sd = math.sqrt(np.square(y - design @ fit).sum() / self.df)

    def contrast(self, check: str, n_checks: int = 1) -> list[float]:
        """The change of the loss that a check of CONCLUSIONS is about, and the ends of its 95 %
        interval, in percent; nan where unknown.

        The intervals of ``n_checks`` checks all hold at once (Bonferroni).
        """
        from scipy.special import stdtrit  # Student's quantile

        names = re.split(r" → |\) against \(", check.strip("()"))
        losses = [self.losses.get(name, {}) for name in names]
        seeds = set.intersection(*map(set, losses))
        if not seeds:
            return [math.nan] * 3
        logs = [fmean(math.log(loss[seed]) for seed in seeds) for loss in losses]
        change = sum(sign * log for sign, log in zip((-1, 1, 1, -1), logs, strict=False))
        half = math.nan
        if self.df >= LEAST_DF:
            quantile = float(stdtrit(self.df, 1 - 0.025 / n_checks))
            half = quantile * self.sd * math.sqrt(len(names) / len(seeds))
        return [100 * math.expm1(x) for x in (change, change - half, change + half)]


def compared(results: Results) -> dict[str, Evidence]:
    """The losses that comparisons rest on, by name: with batch norm as training left it and, if the
    runs have it, re-estimated."""
    evidence = {}
    for prefix, label in (("vl", ""), ("precise", "re-estimated ")):
        ours = Evidence(results.values, results.judged(prefix))
        if prefix != "vl" and not ours.losses:
            continue
        for name in results.values:
            for word, resource in (("updates", "n_batches"), ("time", "minutes")):
                random = results.random_within(name, resource)[ours.quantity]
                ours.losses[f"RAND in {name}'s {word}"] = random
        evidence[label + ("VLavg" if results.start else "VL3")] = ours
    return evidence


def with_interval(change: float, low: float, high: float, form: str) -> str:
    if math.isnan(low):
        return "–" if math.isnan(change) else f"{change:{form}}"
    return f"{change:{form}} ({low:{form}} to {high:{form}})"


def judge(low: float, high: float, wanted: str, theirs: float) -> str:
    """Whether an interval says that a check "holds" or "fails", or leaves it "open".

    It also fails if there is no difference worth the name where the paper has one.
    """
    least, most = WANTED[wanted]
    if least < low and high < most:
        return "holds"
    if high < least or low > most:
        return "fails"
    least, most = WANTED[paper.SIMILAR]
    similar = least < low and high < most
    return "fails" if similar and (theirs < low or theirs > high) else "open"


def verdict(outcomes: Iterable[str]) -> str:
    """What the outcomes of a conclusion's checks say of it."""
    counts = Counter(outcomes)
    answer = "open" if counts["open"] else "supported"
    if counts["fails"]:
        answer = "contradicted"
    words = [f"{counts[word]} {word}" for word in ("holds", "fails", "open") if counts[word]]
    return f"**{answer}** ({', '.join(words)})"


def flatness(results: Results) -> list[str]:
    """By how much more epochs would lower RAND's loss, if it goes on as from VL1 to VL3."""
    first, _, last = (results.epochs[i] for i in stages(results.epochs, results.start))
    ours = (results.mean("RAND", name)[0] for name in ("vl1", "vl3"))
    theirs = (PAPER["RAND"][name] for name in ("vl1", "vl3"))
    falls = []
    for (loss1, loss3), growth in (
        (ours, last / first),
        (theirs, paper.PAPER_STAGES[2] / paper.PAPER_STAGES[0]),
    ):
        if math.isnan(loss3):
            return []
        power = math.log(loss3 / loss1) / math.log(growth)
        falls.append(f"{100 * (1 - 1.1**power):.1f} %")
    text = "From VL1 to VL3, 10 % more epochs lower RAND's loss by {} (in the paper by {}).\n"
    return [text.format(*falls)]


def conclusions(results: Results) -> str:
    """The report on the conclusions, as Markdown."""
    notes, evidence = results.notes, compared(results)
    theirs = Evidence(THEIRS, results.judged("vl"))
    timed = not math.isnan(results.reduction("SSB-DBS-BR", "minutes")[0])
    time = " The time that it saves is in Table 3." if timed else ""
    what = "VL3, as the paper's Table 4 does"
    if results.start:
        n = len(results.epochs) - stages(results.epochs, results.start)[0]
        what = f"VLavg, the mean over the last {n} validations"
    ours = next(iter(evidence.values()))
    spread = "unknown with so few runs"
    if ours.df >= LEAST_DF:
        spread = f"residual sd {ours.sd:.1%}, {ours.df} degrees of freedom"
    lines = [
        "**The paper's conclusions**\n",
        f"Each rests on comparisons of {what}. In parentheses: 95 % intervals from differences "
        f"paired by seed ({spread}), which hold jointly for all comparisons of a conclusion. "
        f"Losses {paper.SIMILAR} are called similar. A comparison holds if its whole interval "
        f"agrees. It fails if none of it does, or if it lies {paper.SIMILAR} without the paper's "
        "change. Otherwise it is open. A conclusion is supported if all its comparisons hold, and "
        "contradicted if one fails.\n",
        *flatness(results),
        *(f"{notes[name]}\n" for name in ("losses", "times") if name in notes),
    ]
    heads = [text for name in evidence for text in (f"{name} %", "")]
    head = f"   | {' | '.join(['From → to', 'wanted', 'paper %', *heads])} |"
    rule = "   |---|---|---:|" + "---:|---|" * len(evidence)
    for number, (claim, wishes) in enumerate(paper.CONCLUSIONS.items(), start=1):
        checks = [(check, wanted) for wanted, some in wishes.items() for check in some]
        rows, outcomes = [], {name: [] for name in evidence}
        for check, wanted in checks:
            their_change = theirs.contrast(check)
            row = [check, wanted, with_interval(*their_change, "+.1f")]
            for name, ours in evidence.items():
                change = ours.contrast(check, len(checks))
                outcomes[name].append(judge(*change[1:], wanted, their_change[0]))
                row += [with_interval(*change, "+.1f"), outcomes[name][-1]]
            rows.append(f"   | {' | '.join(row)} |")
        needed = re.findall(r"[A-Z][A-Z-]+", str(checks))
        missing = [name for name in EXPERIMENTS if name in needed and name not in results.values]
        answer = " and, re-estimated, ".join(map(verdict, outcomes.values()))
        if missing:
            answer = f"**not run** (needs {', '.join(missing)})"
        lines += [f"{number}. {claim.format(answer, time)}\n", head, rule, *rows, ""]
    return "\n".join(lines)


def missing_results(results: Results) -> list[str]:
    """What is still to be trained."""
    epochs, present = results.epochs, {run.experiment for run in results.runs}
    absent = [name for name in EXPERIMENTS if name not in present and not results.sweep]
    missing = [f"no run of {', '.join(absent)}"] if absent else []
    for run in results.runs:
        if not all(math.isfinite(record["loss"]) for record in run.validations):
            missing.append(f"{run.path}: has diverged, and is left out")
        elif len(run.losses(epochs)) < len(epochs):
            missing.append(f"{run.path}: {run.done} of {epochs[-1]} epochs")
    return missing


def main() -> None:
    what = "Fill the paper's Tables 1-4 and one more, and judge its five conclusions"
    results, output = parse_args(what, "tables")
    parts = (sweep,) if results.sweep else (table1, table2, table3, table4, table5, conclusions)
    texts = {part.__name__: part(results) for part in parts}
    for name, text in texts.items():
        (output / f"{name}.md").write_text(text, encoding="utf-8")
    print("\n".join(texts.values()))
    if missing := missing_results(results):
        print("Missing:\n  " + "\n  ".join(missing) + "\n")
    print(f"wrote {', '.join(f'{name}.md' for name in texts)} to {output}")


if __name__ == "__main__":
    exit_on_user_error(main)
