"""The paper's Tables 1-4 and its five conclusions, filled from what runs of train.py recorded.

    python scripts/tables.py runs/table2                       # the output of run_all.sh
    python scripts/tables.py runs/seed0 runs/seed1 --output runs/both

Prints them, and writes table1-4 as Markdown and CSV, and conclusions.md. Unfinished runs are
taken as far as they have come, and what is missing is named.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError, exit_on_user_error
from files import make_folder
from hparams import MAY_CHANGE, HParams
from logger import read_metrics
from scripts.paper import (
    BATCHING,
    EXPERIMENTS,
    PAPER,
    PAPER_BATCHES,
    PAPER_EPOCHS,
    PAPER_PARAMETERS,
    PAPER_REDUCTION,
    PAPER_STAGES,
    PARAMETERS,
    experiment_name,
)

WORDS = ("holds", "fails", "open")  # what a comparison can be found to do
LEAST_DF = 4  # a spread from fewer degrees of freedom decides nothing
MARGIN = 0.02  # losses this close are similar: the paper calls 0.318 and 0.322 so
SIMILAR = f"within ±{MARGIN:.0%}"
LEAST_VALIDATIONS = 4  # of three or fewer, smoothing would average all
COMPARISONS = {  # Table 4
    "SB or SSB": [("SB", "SSB"), ("SB-BR", "SSB-BR"), ("SB-DBS", "SSB-DBS")],
    "without or with BR": [("SB", "SB-BR"), ("SSB", "SSB-BR"), ("SSB-DBS", "SSB-DBS-BR")],
    "without or with DBS": [("SB", "SB-DBS"), ("SSB", "SSB-DBS"), ("SSB-BR", "SSB-DBS-BR")],
}

# Reading runs

# The choice of batches: what may differ between the runs that a table compares. (LRF may not:
# the other two parameters are solved for it.)
CHOICE = {*BATCHING, "bucket_size", "n_bins", "bucket_edges", "n_buckets"}
# Nor may the clips, which the number of their frames stands for: lists may have moved.
MOVABLE = {*MAY_CHANGE, "training_files", "validation_files"}
MOVABLE -= {"learning_rate", "epochs_per_validation"}
RECORDED = {  # what records of an event have to hold
    "epoch": {
        "minutes", "zpr", "abl", "n_batches", "total_length", "frames_per_second",
        "peak_memory_gib",
    },
    "validation": {"loss", "masked_loss"},
}  # fmt: skip
# What trained a run, by train.py's record of each "start" or resume: its times depend on it.
CONDITIONS = ("device", "threads", "decoder", "precision", "torch")


class Run(NamedTuple):
    """One training, as train.py recorded it."""

    path: Path
    experiment: str
    settings: dict[str, Any]  # of hparams.json
    epochs: list[dict[str, Any]]  # records of "epoch" events
    validations: list[dict[str, Any]]  # and of "validation" events
    conditions: list[tuple[str, ...]]  # the CONDITIONS of each start that an epoch followed


def load_runs(folders: Iterable[Path]) -> list[Run]:
    """Every run under ``folders``, the paper's experiments in its order, then others, by seed.

    Raises:
        UserError: a folder without runs, a damaged record, an experiment twice with one seed, or
            runs whose settings differ in more than the batching.
    """
    runs: list[Run] = []
    for folder in folders:
        paths = sorted(path.parent for path in folder.rglob("hparams.json"))
        if not paths:
            raise UserError(f"{folder}: holds no run; name the output of run_all.sh or train.py")
        runs += map(load_run, paths)
    order = {name: i for i, name in enumerate(EXPERIMENTS)}
    runs.sort(key=lambda r: (order.get(r.experiment, 99), r.experiment, r.settings["seed"]))
    for one, other in itertools.pairwise(runs):
        if (one.experiment, one.settings["seed"]) == (other.experiment, other.settings["seed"]):
            raise UserError(
                f"{one.path} and {other.path}: are both {one.experiment} with seed "
                f"{one.settings['seed']}; name folders that hold it once"
            )
    for run in runs:
        same = next(other for other in runs if other.experiment == run.experiment)
        _require_equal(same, run, {"seed"})
        _require_equal(runs[0], run, {"seed", *CHOICE})
    return runs


def load_settings(path: Path) -> dict[str, Any]:
    """A run's settings, from its hparams.json.

    Raises:
        UserError: there are none, or those of another version.
    """
    file = path / "hparams.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if missing := set(BATCHING) - set(settings):
            raise ValueError(f"no {', '.join(sorted(missing))}")
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return dataclasses.asdict(HParams(**settings))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file}: not the settings of a run of this version ({error}); name another folder"
        ) from None


def load_run(path: Path) -> Run:
    """A run's settings and records.

    Raises:
        UserError: a file of them cannot be read, or is not of this version.
    """
    settings, metrics = load_settings(path), path / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []  # it has only just begun
    events: dict[str, list[dict[str, Any]]] = {"epoch": [], "validation": []}
    # Older versions recorded no start: only the settings tell.
    unrecorded = tuple(str(settings.get(name, "unknown")) for name in CONDITIONS)
    conditions, starts = [], []
    for record in records:
        if record["event"] == "start":
            starts.append(tuple(str(record.get(name, "unknown")) for name in CONDITIONS))
        if record["event"] in events:
            if missing := RECORDED[record["event"]] - set(record):
                raise UserError(f"{metrics}: a record has no {missing.pop()}; train the run anew")
            events[record["event"]].append(record)
        if record["event"] == "epoch":
            conditions += starts or [unrecorded] * (not conditions)
            starts = []
    return Run(path, experiment_name(settings), settings, *events.values(), conditions)


def difference(one: dict[str, Any], other: dict[str, Any], exempt: set[str]) -> str | None:
    """The first setting, but for those ``exempt``, that keeps two runs from being compared."""
    names = (n for n in one if n not in exempt | MOVABLE and one[n] != other[n])
    return next(names, None)


def inequality(one: Run, other: Run, exempt: set[str]) -> str | None:
    """What keeps two runs from being compared: a setting, but for those ``exempt``, or clips."""
    if name := difference(one.settings, other.settings, exempt):
        values = one.settings[name], other.settings[name]
        return f"{name} is {values[0]} in the one and {values[1]} in the other"
    frames = [
        round(60 * record["minutes"] * record["frames_per_second"])
        for record in (*one.epochs[:1], *other.epochs[:1])
    ]
    if len(set(frames)) > 1:
        return (
            f"an epoch has {frames[0]:,} frames of speech in the one and {frames[1]:,} in the other"
        )
    return None


def _require_equal(one: Run, other: Run, exempt: set[str]) -> None:
    if reason := inequality(one, other, exempt):
        raise UserError(
            f"{one.path} and {other.path}: {reason}; compare runs that differ in their batching "
            "alone"
        )


def unequal_conditions(runs: Iterable[Run]) -> str | None:
    """Which runs were trained in which conditions, if not all in the same; else None.

    What is unknown equals only what is unknown too.
    """
    groups: dict[tuple[str, ...], dict[str, None]] = {}
    for run in runs:
        for conditions in run.conditions:
            groups.setdefault(conditions, {})[str(run.path)] = None
    if len(groups) < 2:
        return None
    varied = [i for i, values in enumerate(zip(*groups, strict=True)) if len(set(values)) > 1]
    parts = []
    for conditions, paths in groups.items():
        named = ", ".join(list(paths)[:3]) + f" and {len(paths) - 3} more" * (len(paths) > 3)
        values = ", ".join(f"{CONDITIONS[i]}={conditions[i]}" for i in varied)
        parts.append(f"{named} trained with {values}")
    return "; ".join(parts)


# Figures of a run


class Series(NamedTuple):
    """The validations that a run of ``planned`` epochs will have made."""

    planned: int
    epochs: list[int]  # done at each validation
    stages: list[int]  # indices into epochs of VL1, VL2 and VL3


def plan_series(runs: Sequence[Run]) -> Series:
    """Stages are the paper's fractions of the epochs: 100, 160 and 220 of 220."""
    planned = max(run.settings["epochs"] for run in runs)
    every = min(run.settings["epochs_per_validation"] for run in runs)
    epochs = [e for e in range(1, planned + 1) if e % every == 0 or e == planned]
    targets = [planned * stage / PAPER_EPOCHS for stage in PAPER_STAGES]
    stages = [min(range(len(epochs)), key=lambda i: abs(epochs[i] - t)) for t in targets]
    return Series(planned, epochs, stages)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each averaged with the previous and the next, where there are (Sec. 6)."""
    return [float(np.mean(losses[max(i - 1, 0) : i + 2])) for i in range(len(losses))]


def losses_of(run: Run, series: Series, name: str = "loss") -> list[float]:
    """The run's validation losses, as far as they follow the series."""
    losses = {record["epoch"] + 1: record[name] for record in run.validations}
    found = []
    for epoch in series.epochs:
        if epoch not in losses:
            break
        found.append(losses[epoch])
    return found


def figures_of(run: Run, series: Series) -> dict[str, float]:
    """What the tables say of a run; a figure that is not known yet is left out."""
    found: dict[str, float] = {}
    for name in ("n_batches", "total_length", "zpr", "abl") if run.epochs else ():
        found[name] = float(np.mean([record[name] for record in run.epochs]))
    if run.epochs:
        found["zpr"] *= 100
        # Medians, which other work on the machine moves less.
        for name, key in (("minutes", "minutes"), ("speed", "frames_per_second")):
            found[name] = float(np.median([record[key] for record in run.epochs]))
        found["memory"] = max(record["peak_memory_gib"] for record in run.epochs)
    enough = len(series.epochs) >= LEAST_VALIDATIONS
    for name, kind in (("vl", "loss"), ("masked", "masked_loss")) if enough else ():
        losses = losses_of(run, series, kind)
        complete = len(losses) == len(series.epochs)
        known = smoothed(losses)[: None if complete else -1]  # the newest lacks its next
        for k, stage in enumerate(series.stages, start=1):
            if stage < len(known):
                found[f"{name}{k}"] = known[stage]
        if complete:
            found[f"{name}_avg"] = float(np.mean(losses[series.stages[0] :]))
    return found


Figures = dict[str, dict[int | str, dict[str, float]]]  # experiment: seed: figures_of its run
Value = tuple[float, float] | None  # mean over seeds, its standard error (nan with one seed)


def values_of(figures: Figures, experiment: str, name: str) -> dict[int | str, float]:
    """One figure of an experiment, by seed, where it is known and finite."""
    found = {
        seed: of_run.get(name, math.nan) for seed, of_run in figures.get(experiment, {}).items()
    }
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def mean_of(values: dict[int | str, float]) -> Value:
    """Mean and standard error, or None of nothing."""
    if not values:
        return None
    numbers, n = list(values.values()), len(values)
    error = float(np.std(numbers, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return float(np.mean(numbers)), error


def show(value: Value, digits: int, paper: float | None = None, paper_digits: int = 2) -> str:
    """``mean ± standard error (paper)``."""
    text = "–"
    if value is not None:
        text = f"{value[0]:,.{digits}f}"
        if not math.isnan(value[1]):
            text += f" ± {value[1]:,.{digits}f}"
    return text if paper is None else f"{text} ({paper:.{paper_digits}f})"


# Tables


class Table(NamedTuple):
    """A table as Markdown shows it, and the same numbers as CSV has them."""

    title: str
    head: list[str]
    rows: list[list[str]]
    records: list[dict[str, Any]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.head, ["---"] + ["---:"] * (len(self.head) - 1), *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"**{self.title}**\n\n{table}\n" + (f"\n*{self.note}*\n" if self.note else "")


def record_of(value: Value, name: str, paper: float | None = None) -> dict[str, str]:
    """The same in CSV: full precision, a column each, empty where unknown."""
    mean, error = value or (math.nan, math.nan)
    record = {name: mean, f"{name}_error": error}
    if paper is not None:
        record[f"{name}_paper"] = paper
    return {key: "" if math.isnan(v) else f"{v:.6g}" for key, v in record.items()}


def table1(figures: Figures, runs: Sequence[Run]) -> Table:
    """Parameters selected, and the padding that they give (Sec. 3)."""
    rows, records = [], []
    for strategy, parameter in PARAMETERS.items():
        experiment = f"{strategy}-BR"
        run = next((run for run in runs if run.experiment == experiment), None)
        chosen = run.settings[parameter] if run else None
        limits = {"SSB": "[0, ∞)", "BKT": "[batch size, clips)", "ATS": "[1, clips / batch size]"}
        names = ("n_batches", "zpr", "abl")
        cells = {name: mean_of(values_of(figures, experiment, name)) for name in names}
        paper = {"n_batches": PAPER_BATCHES[strategy], **PAPER[experiment]}
        rows.append([
            experiment,
            f"{parameter} {chosen if run else '–'} ({PAPER_PARAMETERS[strategy]})",
            limits[strategy],
            show(cells["n_batches"], 0, paper["n_batches"], 0),
            show(cells["zpr"], 2, paper["zpr"]),
            show(cells["abl"], 2, paper["abl"]),
        ])  # fmt: skip
        record = {"experiment": experiment, "parameter": parameter, "value": chosen}
        record["value_paper"] = PAPER_PARAMETERS[strategy]
        for name, value in cells.items():
            record |= record_of(value, name, paper[name])
        records.append(record)
    head = ["Batching", "Selected parameter", "Range", "Batches", "ZPR %", "ABL"]
    title = "Table 1: parameters selected for the same padding (the paper's on LJSpeech)"
    return Table(title, head, rows, records)


TABLE2 = {  # figure: its column, digits of ours and of the paper's
    "zpr": ("ZPR %", 2, 2), "abl": ("ABL", 1, 2), "minutes": ("min/epoch", 3, 2),
    "vl1": ("VL1", 3, 3), "vl2": ("VL2", 3, 3), "vl3": ("VL3", 3, 3), "vl_avg": ("VLavg", 3, 3),
}  # fmt: skip
CLOCKED = {"minutes", "speed"}
BEYOND = {  # what Table 2 does not have
    "n_batches": ("batches", 1), "total_length": ("sum of batch lengths", 0),
    "speed": ("real frames/s", 0), "memory": ("peak memory GiB", 2),
    "masked3": ("masked VL3", 3), "masked_avg": ("masked VLavg", 3),
}  # fmt: skip


def table2(figures: Figures, series: Series, notes: dict[str, str]) -> tuple[Table, Table]:
    """Efficiency and validation losses; and what the paper has no column for."""
    stages = ", ".join(str(series.epochs[i]) for i in series.stages)
    names = [*EXPERIMENTS, *(name for name in figures if name not in EXPERIMENTS)]
    shown, beyond, records = [], [], []
    for experiment in names:
        paper, record = PAPER.get(experiment, {}), {"experiment": experiment}
        record["seeds"] = len(values_of(figures, experiment, "abl"))
        values = {n: mean_of(values_of(figures, experiment, n)) for n in TABLE2 | BEYOND}
        shown.append([experiment, str(record["seeds"])])
        shown[-1] += [show(values[n], d, paper.get(n), pd) for n, (_, d, pd) in TABLE2.items()]
        parts = experiment.removesuffix("-BR")
        batches = {"n_batches": PAPER_BATCHES.get(parts)} if experiment in PAPER else {}
        beyond.append([experiment])
        beyond[-1] += [show(values[n], d, batches.get(n), 0) for n, (_, d) in BEYOND.items()]
        for name, value in values.items():
            theirs = (paper | batches).get(name)
            if theirs is None and name in TABLE2:
                theirs = math.nan  # keeps the column
            record |= record_of(value, name, theirs)
        records.append(record)
    losses = (
        f"VL1, VL2, VL3: validation loss after {stages} of {series.planned} epochs, each averaged "
        "with its neighbours; VLavg: mean between the first and the last."
    )
    note = (
        f"{notes.get('losses', losses)} {notes.get('times', 'min/epoch: median over epochs.')} "
        "Mean ± standard error over seeds; in parentheses the paper's, after "
        f"{', '.join(map(str, PAPER_STAGES))} of {PAPER_EPOCHS} epochs."
    )
    head = ["Batching", "Seeds", *(column for column, *_ in TABLE2.values())]
    title = "Table 2: efficiency and validation losses (the paper's, on LJSpeech)"
    first = Table(title, head, shown, records, note)
    memory = "Peak memory: of the GPU, or on a CPU of the process, which varies as the times do."
    note = (
        f"Sum of batch lengths: decoder steps an epoch. {notes.get('memory', memory)} Masked: the "
        "loss over real frames only, which padding does not change."
    )
    head = ["Batching", *(column for column, _ in BEYOND.values())]
    return first, Table("Table 2, beyond the paper", head, beyond, [], note)


def reduction(figures: Figures, experiment: str, name: str) -> Value:
    """Percent by which ``name`` falls from RAND's, and its standard error."""
    random, ours = (mean_of(values_of(figures, e, name)) for e in ("RAND", experiment))
    if random is None or ours is None:
        return None
    ratio = ours[0] / random[0]
    return 100 * (1 - ratio), 100 * ratio * math.hypot(ours[1] / ours[0], random[1] / random[0])


def table3(figures: Figures, notes: dict[str, str]) -> Table:
    """Training time saved against RAND, and how much of it fewer decoder steps predict."""
    rows, records = [], []
    for experiment in EXPERIMENTS[1:]:
        saved = None
        random, ours = (mean_of(values_of(figures, e, "minutes")) for e in ("RAND", experiment))
        if random and ours:
            saved = random[0] - ours[0], math.hypot(random[1], ours[1])
        minutes = PAPER["RAND"]["minutes"] - PAPER[experiment]["minutes"]
        percent = PAPER_REDUCTION.get(experiment, 100 * minutes / PAPER["RAND"]["minutes"])
        time, steps = (reduction(figures, experiment, name) for name in ("minutes", "total_length"))
        rows.append([experiment, show(saved, 3, minutes), show(time, 2, percent), show(steps, 2)])
        records.append({
            "experiment": experiment, **record_of(saved, "minutes", minutes),
            **record_of(time, "percent", percent), **record_of(steps, "steps_percent"),
        })  # fmt: skip
    head = ["From RAND to", "saved, min/epoch", "saved %", "fewer decoder steps %"]
    title = "Table 3: training time reduction (the paper's, on one GTX 1080)"
    return Table(title, head, rows, records, notes.get("times", ""))


# Evidence: contrasts of log losses


class Evidence:
    """Compares a loss of experiments, with the spread between seeds as the yardstick.

    Seeds scatter its logarithm alike in every experiment, so that one standard deviation is pooled
    over those with two seeds or more, and an experiment with one seed can be compared too.
    """

    def __init__(self, figures: Figures, name: str) -> None:
        losses = {e: list(values_of(figures, e, name).values()) for e in figures}
        self.logs = {e: np.log(values) for e, values in losses.items() if values}
        self.df = sum(len(logs) - 1 for logs in self.logs.values())
        spread = sum(((logs - logs.mean()) ** 2).sum() for logs in self.logs.values())
        self.sd = math.sqrt(spread / self.df) if self.df else math.nan

    def contrast(self, weights: dict[str, float], checks: int = 1) -> tuple[float, float] | None:
        """Sum of weight x mean log loss, and half its 95 % interval; nan with one seed.

        The interval is one of so many ``checks`` that all hold at once (Bonferroni).
        """
        if not set(weights) <= set(self.logs):
            return None
        estimate = sum(w * self.logs[name].mean() for name, w in weights.items())
        error = self.sd * math.sqrt(sum(w**2 / len(self.logs[n]) for n, w in weights.items()))
        quantile = stats.t.ppf(1 - 0.025 / checks, self.df) if self.df else math.nan
        return float(estimate), float(quantile * error)


def change(one: str, other: str) -> dict[str, float]:
    """The contrast of going from ``one`` to ``other``."""
    return {other: 1.0, one: -1.0}


def in_percent(contrast: tuple[float, float] | None) -> str:
    """The change of the loss, with its 95 % interval."""
    if contrast is None:
        return "–"
    middle, half = contrast
    low, mid, high = (100 * math.expm1(x) for x in (middle - half, middle, middle + half))
    return f"{mid:+.1f}" if math.isnan(half) else f"{mid:+.1f} ({low:+.1f} to {high:+.1f})"


def table4(figures: Figures) -> Table:
    """A/B comparisons of VL3."""
    evidence, rows, records = Evidence(figures, "vl3"), [], []
    for part, pairs in COMPARISONS.items():
        for one, other in pairs:
            paper = 100 * (1 - PAPER[other]["vl3"] / PAPER[one]["vl3"])
            contrast = evidence.contrast(change(one, other))
            ours = "–"
            record = {"part": part, "from": one, "to": other, "reduction_percent": "", "low": ""}
            record |= {"high": "", "reduction_percent_paper": f"{paper:.2f}"}
            if contrast:
                middle, half = contrast
                cells = [-100 * math.expm1(x) for x in (middle, middle + half, middle - half)]
                ours = f"{cells[0]:.2f}"
                record["reduction_percent"] = ours
                if not math.isnan(half):
                    record["low"], record["high"] = (f"{cell:.2f}" for cell in cells[1:])
                    ours += f" ({record['low']} to {record['high']})"
            vl3 = [
                show(mean_of(values_of(figures, e, "vl3")), 3, PAPER[e]["vl3"], 3)
                for e in (one, other)
            ]
            rows.append([part, one, vl3[0], other, vl3[1], ours, f"{paper:.2f}"])
            records.append(record)
    head = ["", "From", "VL3", "To", "VL3", "Reduction %", "Paper's %"]
    note = (
        "In parentheses: beside a loss the paper's, beside a reduction (of the geometric mean) "
        "its 95 % interval by itself, from the spread between seeds pooled over all experiments."
    )
    return Table("Table 4: A/B comparisons of VL3", head, rows, records, note)


# Conclusions


class Check(NamedTuple):
    """One comparison of losses that a conclusion rests on.

    ``weights`` is a contrast of :class:`Evidence`, and ``wanted`` what it has to be: "lower" or
    "higher" than 0, or ``SIMILAR`` to it.
    """

    what: str
    weights: dict[str, float]
    wanted: str


def conclusions() -> list[tuple[str, list[Check], str]]:
    """The paper's five (Sec. 6), as comparisons of losses, and what is to be added to them."""

    def lower(one: str, other: str) -> Check:
        return Check(f"{one} → {other}", change(one, other), "lower")

    def more(pair: tuple[str, str], than: tuple[str, str]) -> Check:
        """``pair`` gains more than ``than`` does."""
        weights: dict[str, float] = defaultdict(float)
        for sign, (one, other) in ((1, pair), (-1, than)):
            for name, w in change(one, other).items():
                weights[name] += sign * w
        return Check(f"({' → '.join(pair)}) against ({' → '.join(than)})", dict(weights), "lower")

    peers = ("SSB-BR", "BKT-BR", "ATS-BR")
    gains = COMPARISONS["without or with BR"] + COMPARISONS["without or with DBS"]
    return [
        (
            "SSB-BR does as well as BKT-BR and ATS-BR",
            [Check(f"{p} → SSB-BR", change(p, "SSB-BR"), SIMILAR) for p in peers[1:]],
            "That LRF tunes the padding more smoothly is Figure 2 (plot_batching.py).",
        ),
        (
            "SSB-BR, BKT-BR and ATS-BR are behind RAND after the same epochs, but can be ahead of "
            "it after the same time",
            [Check(f"RAND → {p}", change("RAND", p), "higher") for p in peers]
            + [lower(f"RAND in {p}'s time", p) for p in peers],
            "RAND in another's time: its loss when the other has ended.",
        ),
        (
            "SSB-DBS-BR is ahead of RAND after the same epochs",
            [lower("RAND", "SSB-DBS-BR")],
            "The time that it saves is in Table 3.",
        ),
        (
            "SSB is better than SB; less so once DBS or BR is on",
            [lower("SB", "SSB")]
            + [more(("SB", "SSB"), pair) for pair in COMPARISONS["SB or SSB"][1:]],
            "",
        ),
        (
            "BR and DBS each lower the loss, most where batches are least random",
            [lower(*pair) for pair in gains] + [more(gains[0], gains[2]), more(gains[3], gains[5])],
            "",
        ),
    ]


def judge(check: Check, contrast: tuple[float, float] | None) -> str:
    """Whether the 95 % interval says that the check "holds" or "fails", or leaves it "open"."""
    if contrast is None or math.isnan(contrast[1]):
        return "open"
    low, high = contrast[0] - contrast[1], contrast[0] + contrast[1]
    if check.wanted == "higher":
        low, high = -high, -low
    if check.wanted != SIMILAR:
        return "holds" if high < 0 else "fails" if low > 0 else "open"
    margin = math.log1p(MARGIN)
    if -margin < low and high < margin:
        return "holds"
    return "fails" if low > margin or high < -margin else "open"


def equal_time(figures: Figures, runs: Sequence[Run], series: Series) -> dict[str, list[float]]:
    """RAND's loss when others have ended: the losses of "RAND in X's time".

    Averaged with the previous validation's, as VL3 is, which has no next one.
    """
    found = {}
    minutes = {name: mean_of(values_of(figures, name, "minutes")) for name in figures}
    curves = [losses_of(run, series) for run in runs if run.experiment == "RAND"]
    curves = [losses for losses in curves if len(losses) == len(series.epochs)]
    every = series.epochs[-1] - series.epochs[-2] if len(series.epochs) > 1 else 0
    for name, of_epoch in minutes.items():
        if curves and of_epoch and minutes["RAND"]:
            epochs = series.planned * of_epoch[0] / minutes["RAND"][0]  # of RAND by then
            at = [min(epochs, series.planned) - back for back in (every, 0)]
            losses = [float(np.mean(np.interp(at, series.epochs, curve))) for curve in curves]
            found[f"RAND in {name}'s time"] = losses
    return found


def conclude(figures: Figures, runs: Sequence[Run], series: Series, notes: dict[str, str]) -> str:
    """The report on the conclusions, as Markdown."""
    ours = {name: Evidence(figures, name) for name in ("vl3", "vl_avg")}
    # After the spread was pooled, since these are RAND's own runs again.
    for name, losses in equal_time(figures, runs, series).items():
        ours["vl3"].logs[name] = np.log(losses)
    theirs = {name: Evidence({e: {0: row} for e, row in PAPER.items()}, name) for name in ours}
    sd, df = ours["vl3"].sd, ours["vl3"].df
    seeds = "unknown with so few seeds"
    if df >= LEAST_DF:
        seeds = f"of VL3 {sd:.1%} sd, pooled over experiments, {df} degrees of freedom"
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
    for number, (claim, checks, remark) in enumerate(conclusions(), start=1):
        rows, found = [], []
        for check in checks:
            row = [check.what, check.wanted]
            for name in ours:
                contrast = ours[name].contrast(check.weights, len(checks))
                row += [in_percent(contrast), in_percent(theirs[name].contrast(check.weights))]
                if name == "vl3":
                    found.append(judge(check, contrast) if df >= LEAST_DF else "open")
            rows.append([*row, found[-1]])
        counts = ", ".join(f"{found.count(w)} {w}" for w in WORDS if w in found)
        verdict = f"**{conclusion_of(found)}** ({counts})"
        needed = [
            e for e in EXPERIMENTS if any(e in c.weights for c in checks) and e not in figures
        ]
        if needed:
            verdict = f"**not run** (needs {', '.join(needed)})"
        lines += [
            f"{number}. {claim}: {verdict}. {remark}".rstrip() + "\n",
            "   | From → to | wanted | VL3 % | paper's | VLavg % | paper's | by VL3 |",
            "   |---|---|---:|---:|---:|---:|---|",
        ]
        lines += [f"   | {' | '.join(row)} |" for row in rows] + [""]
    return "\n".join(lines)


def conclusion_of(found: Sequence[str]) -> str:
    if "fails" in found:
        return "contradicted"
    return "not decidable at this scale" if "open" in found else "supported"


def missing(runs: Sequence[Run], series: Series) -> list[str]:
    """What the tables still lack, a line each."""
    have = {run.experiment for run in runs}
    absent = ", ".join(name for name in EXPERIMENTS if name not in have)
    lines = [f"no run of {absent}"] if absent else []
    for run in runs:
        if len(losses_of(run, series)) < len(series.epochs):
            lines.append(f"{run.path}: {len(run.epochs)} of {series.planned} epochs")
        if not all(math.isfinite(record["loss"]) for record in run.validations):
            lines.append(f"{run.path}: has diverged, and is left out")
    return lines


# The program


def parse_args(description: str, output: str) -> argparse.Namespace:
    """The command line that tables.py and figures.py share."""
    parser = ArgumentParser(description=f"{description}, from the records of runs; finished or not")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="outputs of run_all.sh, or folders of train.py's")
    add(
        "--timing", type=Path, metavar="RUNS",
        help="take the times from these runs: where RUNS shared their machine, and these did not",
    )  # fmt: skip
    add("--output", type=Path, metavar="DIR", help=f"where to write (default: RUNS/{output})")
    args = parser.parse_args()
    args.output = args.output or args.runs[0] / output
    return args


def read_series(
    args: argparse.Namespace,
) -> tuple[list[Run], Series, Figures, dict[str, str]]:
    """The runs that are named, what they will be in the end, and their figures by now.

    Last come sentences on what is left out of the figures, and why: "losses", "times", "memory".
    """
    runs = load_runs(args.runs)
    series, figures, notes = plan_series(runs), defaultdict(dict), {}
    for run in runs:
        figures[run.experiment][run.settings["seed"]] = figures_of(run, series)
    if len(series.epochs) < LEAST_VALIDATIONS:
        notes["losses"] = (
            f"VL1, VL2, VL3 and VLavg are left out: with {LEAST_VALIDATIONS - 1} validations or "
            f"fewer (here {len(series.epochs)}), their averages would be nearly the same; set more "
            "epochs, or a smaller epochs_per_validation."
        )
    timed = runs
    if args.timing:
        timed = load_runs([args.timing])
        _require_equal(runs[0], timed[0], {"seed", *CHOICE})
        _drop(figures, CLOCKED)
        for run in timed:
            clocked = {k: v for k, v in figures_of(run, series).items() if k in CLOCKED}
            figures[run.experiment][f"timing, seed {run.settings['seed']}"] = clocked
    if reason := unequal_conditions(timed):
        notes["times"] = f"Times are not compared: {reason}."
        _drop(figures, CLOCKED)
    if reason := unequal_conditions(runs):
        notes["memory"] = f"Peak memory is not compared: {reason}."
        _drop(figures, {"memory"})
    make_folder(args.output)
    return runs, series, dict(figures), notes


def _drop(figures: Figures, names: set[str]) -> None:
    for found in (found for of_seeds in figures.values() for found in of_seeds.values()):
        for name in names & set(found):
            del found[name]


def main() -> None:
    args = parse_args("Fill the paper's Tables 1-4, and judge its five conclusions", "tables")
    runs, series, figures, notes = read_series(args)
    output = args.output
    table_2, beyond = table2(figures, series, notes)
    tables = [table1(figures, runs), table_2, table3(figures, notes), table4(figures)]
    texts = {f"table{number}": table.markdown() for number, table in enumerate(tables, start=1)}
    texts["table2"] += f"\n{beyond.markdown()}"
    texts["conclusions"] = conclude(figures, runs, series, notes)
    try:
        for name, text in texts.items():
            (output / f"{name}.md").write_text(text, encoding="utf-8")
        for number, table in enumerate(tables, start=1):
            with open(output / f"table{number}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, table.records[0])
                writer.writeheader()
                writer.writerows(table.records)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from None
    print("\n".join(texts.values()))
    if lines := missing(runs, series):
        print("Missing:\n  " + "\n  ".join(lines) + "\n")
    print(f"wrote {output}/table1-4 as .md and .csv, and conclusions.md")


if __name__ == "__main__":
    exit_on_user_error(main)
