"""Reads what runs of train.py recorded: which of them can be compared, and their losses.

A run is its output folder: hparams.json has its settings, metrics.jsonl its records.
"""

import itertools
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import ArgumentParser, UserError
from files import make_folder
from hparams import AUDIO, MAY_CHANGE, recorded_hparams
from scripts.paper import BATCHING, EXPERIMENTS, PAPER_EPOCHS, PAPER_STAGES, experiment_name

# The batching settings that compared runs may differ in. LRF is not one of them: bucket_size and
# n_bins are chosen to match its padding.
CHOICE = {*BATCHING, "longest_first", "bucket_size", "n_bins", "bucket_edges", "n_buckets"}
# Settings that any two runs may differ in. Filelists may have moved: the number of frames in an
# epoch tells whether two runs had the same clips.
IGNORED = {*MAY_CHANGE, "training_files", "validation_files"} - {"epochs_per_validation"}
LEAST_VALIDATIONS = 4  # smoothing three or fewer would average all of them
# What a run's times depend on. train.py records it in a "start" event, at each start or resume.
CONDITIONS = ("device", "threads", "decoder", "precision", "torch")
AVERAGES = {  # of the records of epochs
    "n_batches": fmean,
    "total_length": fmean,
    "zpr": lambda rates: 100 * fmean(rates),  # percent
    "abl": fmean,
    "minutes": median,  # which other work on the machine affects less
    "frames_per_second": median,
    "peak_memory_gib": max,
}
TIMES = {"minutes", "frames_per_second"}  # of these, what --timing replaces
REQUIRED = {"epoch": set(AVERAGES), "validation": {"loss", "masked_loss", "diagonality"}}
LOSSES = {"vl": "loss", "masked": "masked_loss", "precise": "precise_loss"}
RESOURCES = {"epochs": "epochs", "steps": "n_batches", "minutes": "minutes"}  # of a training
Values = dict[str, dict[str, dict[int, float]]]  # experiment: quantity: seed: value


class Run(NamedTuple):
    """What train.py recorded of one training, finished or not."""

    path: Path
    settings: dict[str, Any]
    experiment: str
    epochs: list[dict[str, Any]]  # the records of "epoch" events
    validations: list[dict[str, Any]]  # the records of "validation" events
    conditions: list[tuple[str, ...]]  # "decoder=scan" and so on, several if a resume changed them
    validation_frames: int | None  # of its validation set; None if unknown

    @property
    def order(self) -> tuple[int, str, int]:
        """Sorts the paper's experiments as its Table 2 does, then others, each by seed."""
        rank = [*EXPERIMENTS, self.experiment].index(self.experiment)
        return rank, self.experiment, self.settings["seed"]

    @property
    def start(self) -> int:
        """Epochs of the checkpoint that it started from; 0 if it has none, or no epoch yet."""
        return self.epochs[0]["epoch"] if self.epochs else 0

    @property
    def done(self) -> int:
        """Epochs done, those of the checkpoint that it started from included; 0 if none has ended
        yet."""
        return self.epochs[-1]["epoch"] + 1 if self.epochs else 0

    def averages(self) -> dict[str, float]:
        """The AVERAGES over the epochs so far; empty before the first has ended."""
        means = AVERAGES if self.epochs else {}
        return {name: mean([e[name] for e in self.epochs]) for name, mean in means.items()}

    def losses(self, epochs: Sequence[int], name: str = "loss") -> list[float]:
        """Its validation losses after ``epochs``, up to the first missing or not finite."""
        by_epoch = {record["epoch"] + 1: record.get(name, math.nan) for record in self.validations}
        losses = (by_epoch.get(epoch, math.nan) for epoch in epochs)
        return list(itertools.takewhile(math.isfinite, losses))

    def staged_losses(self, epochs: Sequence[int]) -> dict[str, float]:
        """VL1, VL2, VL3 and VLavg of each of LOSSES, as far as they are known."""
        values = {}
        for prefix, name in LOSSES.items():
            values |= staged(prefix, self.losses(epochs, name), epochs, self.start)
        return values


class Results(NamedTuple):
    """What the runs of a series give for the tables and figures."""

    runs: list[Run]
    start: int  # epochs of the checkpoints that they started from
    epochs: list[int]  # after which they validate
    values: Values
    notes: dict[str, str]  # what is left out, and why: "losses", "times", "memory"
    sweep: str = ""  # the setting whose every value makes an experiment of its own

    def mean(self, experiment: str, name: str) -> tuple[float, float]:
        """The mean over seeds and its standard error; nan where unknown."""
        values = list(self.values.get(experiment, {}).get(name, {}).values())
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return fmean(values) if values else math.nan, error

    def judged(self, prefix: str) -> str:
        """The loss to compare: VL3, as in the paper, or VLavg for runs from a common checkpoint,
        whose curves are flatter."""
        return f"{prefix}_avg" if self.start else f"{prefix}3"

    def random_within(self, experiment: str, resource: str) -> dict[str, dict[int, float]]:
        """RAND's losses after as many "minutes" or updates ("n_batches") as another experiment has
        taken at each validation: quantity: seed: value."""
        values = defaultdict(dict)
        share = self.mean(experiment, resource)[0] / self.mean("RAND", resource)[0]
        points = [self.start + min(share, 1) * (epoch - self.start) for epoch in self.epochs]
        for run in self.runs if share > 0 else ():
            for prefix, name in LOSSES.items() if run.experiment == "RAND" else ():
                losses = run.losses(self.epochs, name)
                if len(losses) == len(self.epochs):
                    losses = np.interp(points, self.epochs, losses)
                    for quantity, value in staged(prefix, losses, self.epochs, self.start).items():
                        values[quantity][run.settings["seed"]] = value
        return values

    def taken(self, experiment: str, resource: str) -> np.ndarray:
        """How much of one of RESOURCES it has taken at each validation, since its start."""
        per_epoch = 1 if resource == "epochs" else self.mean(experiment, resource)[0]
        return per_epoch * (np.array(self.epochs) - self.start)

    def at_equal(self, resource: str) -> tuple[float, dict[str, dict[int, float]]]:
        """The most of a resource that all finished runs have taken, and the masked losses after
        it, interpolated linearly between validations: experiment: seed: loss."""
        curves, values = [], defaultdict(dict)
        for run in self.runs:
            losses, x = run.losses(self.epochs, "masked_loss"), self.taken(run.experiment, resource)
            curves.append((run, x[: len(losses)], losses))
        ends = [x[-1] for _, x, _ in curves if len(x) == len(self.epochs) and x[-1] > 0]  # not nan
        amount = min(ends, default=math.nan)
        for run, x, losses in curves:
            if len(x) and x[0] <= amount <= x[-1]:
                values[run.experiment][run.settings["seed"]] = float(np.interp(amount, x, losses))
        return amount, values

    def reduction(self, experiment: str, name: str) -> tuple[float, float]:
        """The percentage by which a quantity is lower than RAND's, and its standard error."""
        random, random_error = self.mean("RAND", name)
        other, error = self.mean(experiment, name)
        relative_error = math.hypot(error / other, random_error / random)
        return 100 * (1 - other / random), 100 * other / random * relative_error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without a last line that is still being written. Numbers that
    are not finite are nan."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        records = [json.loads(line) for line in lines]
        for record in records:
            if missing := REQUIRED.get(record["event"], set()) - set(record):
                raise ValueError(f"a record has no {min(missing)}")
            record |= {name: math.nan for name, value in record.items() if value is None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "name the output of a train.py of this version"
        raise UserError(f"{path}: cannot be read ({error}); {fix}") from None
    return records


def load_settings(path: Path) -> dict[str, Any]:
    """The settings in a run's hparams.json."""
    return vars(recorded_hparams(path))


def load_run(path: Path) -> Run:
    settings, file = load_settings(path), path / "metrics.jsonl"
    events, conditions = defaultdict(list), {}
    for record in read_metrics(file) if file.exists() else []:  # a new run has none yet
        events[record["event"]].append(record)
        if record["event"] == "epoch":  # a start counts once an epoch has ended
            for start in events["start"] or [settings]:  # older versions recorded no start
                values = (f"{name}={start.get(name, 'unknown')}" for name in CONDITIONS)
                conditions[tuple(values)] = None
    experiment = experiment_name(settings)
    frames = next((start.get("validation_frames") for start in events["start"][-1:]), None)
    records = events["epoch"], events["validation"]
    return Run(path, settings, experiment, *records, list(conditions), frames)


def load_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The runs that are or lie in ``folders``, those of each folder in order, and what is wrong
    with those that cannot be read."""
    runs, problems = [], []
    for folder in folders:
        paths, readable = sorted(folder.rglob("hparams.json")), []
        if not paths:
            fix = "name the output of run_all.sh or train.py"
            problems.append(f"{folder}: holds no run; {fix}")
        for path in paths:
            try:
                readable.append(load_run(path.parent))
            except UserError as error:
                problems.append(str(error))
        runs += sorted(readable, key=lambda run: run.order)
    return runs, problems


def names_of(runs: Sequence[Run]) -> list[str]:
    """Names that tell the runs apart."""
    paths = [run.path.resolve() for run in runs]
    # A "seed0" needs its parent's.
    parents = [p.parent.parent if p.name.startswith("seed") else p.parent for p in paths]
    return [os.path.relpath(path, os.path.commonpath(parents)) for path in paths]


def label(experiment: str, sweep: str, settings: dict[str, Any]) -> str:
    """An experiment's name; in a sweep with the value of the swept setting, as in
    "SSB-BR,batch_size=4"."""
    value = str(settings[sweep]).removesuffix(".0") if sweep else ""
    return f"{experiment},{sweep}={value}" if sweep else experiment


def load_comparable(folders: Iterable[Path], sweep: str = "") -> list[Run]:
    """All runs in ``folders``, in order; :class:`UserError` if an experiment has a seed twice, or
    if they differ in more than their batching and the setting ``sweep``."""
    runs, problems = load_runs(folders)
    if problems:
        raise UserError("\n".join(problems))
    if sweep and sweep not in runs[0].settings:
        raise UserError(f"--sweep {sweep}: unknown setting; name the one that run_all.sh swept")
    runs.sort(key=lambda run: (*run.order[:2], run.settings.get(sweep, 0), run.order))
    runs = [r._replace(experiment=label(r.experiment, sweep, r.settings)) for r in runs]
    for first, second in itertools.combinations(runs, 2):
        names = f"{first.path} and {second.path}"
        if first.order == second.order:
            what = f"{first.experiment} with seed {first.settings['seed']}"
            fix = "name folders that hold it once; for a sweep give its setting by --sweep"
            raise UserError(f"{names}: are both {what}; {fix}")
        choice = set() if first.experiment == second.experiment else CHOICE
        reason = inequality(first, second, {"seed", sweep, *choice})
        reason = reason or unequal_losses(first, second)
        if first.epochs and second.epochs and first.start != second.start:
            reason = f"one starts after {first.start} epochs, the other after {second.start}"
        if reason:
            raise UserError(f"{names}: {reason}; compare runs that differ only in batching")
    return runs


def difference(first: dict[str, Any], second: dict[str, Any], exempt: set[str]) -> str | None:
    """The first setting, other than those ``exempt``, that makes two runs incomparable."""
    exempt = exempt | IGNORED
    if first["dynamic_batch_size"] != second["dynamic_batch_size"]:  # only DBS has a capacity
        exempt |= {"batch_capacity", "batch_capacity_seconds"}
    return next((n for n in first if n not in exempt and first[n] != second[n]), None)


def inequality(first: Run, second: Run, exempt: set[str]) -> str | None:
    """Why two runs are incomparable: a setting, other than those ``exempt``, or their clips."""
    if name := difference(first.settings, second.settings, exempt):
        values = first.settings[name], second.settings[name]
        return f"{name} is {values[0]} in the first and {values[1]} in the second"
    epochs = [*first.epochs[:1], *second.epochs[:1]]
    frames = [round(60 * record["minutes"] * record["frames_per_second"]) for record in epochs]
    if len(set(frames)) > 1:
        return f"an epoch has {frames[0]:,} frames in the first and {frames[1]:,} in the second"
    return None


def unequal_losses(first: Run, second: Run) -> str | None:
    """Why no validation loss of two runs compares: other mels, or other clips."""
    for name in AUDIO:
        if first.settings[name] != second.settings[name]:
            values = first.settings[name], second.settings[name]
            return f"{name} is {values[0]} in the first and {values[1]} in the second"
    frames = [run.validation_frames for run in (first, second)]
    if None not in frames and frames[0] != frames[1]:
        return f"validation has {frames[0]:,} frames in the first and {frames[1]:,} in the second"
    return None


def unequal_conditions(runs: Iterable[Run]) -> str:
    """Which runs trained under which CONDITIONS; empty if all trained under the same."""
    groups = defaultdict(list)
    for run in runs:
        for conditions in run.conditions:
            groups[conditions].append(str(run.path))
    shared = set.intersection(*map(set, groups)) if groups else set()
    parts = []
    for conditions, paths in groups.items():
        named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        parts.append(f"{named} trained with {', '.join(c for c in conditions if c not in shared)}")
    return "; ".join(parts) if len(parts) > 1 else ""


def stages(epochs: Sequence[int], start: int) -> list[int]:
    """Where in ``epochs`` are VL1, VL2 and VL3: the paper's are after 100, 160, 220 of 220."""
    targets = [start + (epochs[-1] - start) * stage / PAPER_EPOCHS for stage in PAPER_STAGES]
    return [min(range(len(epochs)), key=lambda i: abs(epochs[i] - t)) for t in targets]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss averaged with the previous and the next, where there are (Sec. 6)."""
    return [fmean(losses[max(i - 1, 0) : i + 2]) for i in range(len(losses))]


def staged(
    prefix: str, losses: Sequence[float], epochs: Sequence[int], start: int
) -> dict[str, float]:
    """VL1, VL2, VL3 and VLavg of the losses so far, of all ``epochs``; none of those unknown, or of
    fewer than LEAST_VALIDATIONS."""
    if len(epochs) < LEAST_VALIDATIONS:
        return {}
    losses = [*losses, *[math.nan] * (len(epochs) - len(losses))]
    indices = stages(epochs, start)
    means = [*(smoothed(losses)[i] for i in indices), fmean(losses[indices[0] :])]
    values = zip(("1", "2", "3", "_avg"), means, strict=True)
    return {prefix + name: value for name, value in values if math.isfinite(value)}


def read_results(folders: Iterable[Path], timing: Path | None = None, sweep: str = "") -> Results:
    """The results of the runs in ``folders``, their times from those in ``timing``, if given."""
    runs = timed = load_comparable(folders, sweep)
    if timing:
        timed = load_comparable([timing], sweep)
        timeless = {"seed", "learning_rate", sweep}  # a step takes as long with any
        if reason := inequality(runs[0], timed[0], timeless | CHOICE):
            names = f"{runs[0].path} and --timing {timed[0].path}"
            raise UserError(f"{names}: {reason}; time runs of the same settings")
    start, planned = max(r.start for r in runs), max(r.settings["epochs"] for r in runs)
    every = runs[0].settings["epochs_per_validation"]  # the same in all
    epochs = [epoch for epoch in range(every, planned, every) if epoch > start] + [planned]
    notes = {}
    if len(epochs) < LEAST_VALIDATIONS:
        notes["losses"] = (
            f"VL1, VL2, VL3 and VLavg are left out: with {LEAST_VALIDATIONS - 1} validations or "
            f"fewer (here {len(epochs)}), their averages would be nearly the same; set more "
            "epochs, or a smaller epochs_per_validation."
        )
    left_out = set()
    if reason := unequal_conditions(timed):
        notes["times"] = f"Times are not compared: {reason}."
        left_out |= TIMES
    if reason := unequal_conditions(runs):
        notes["memory"] = f"Peak memory is not compared: {reason}."
        left_out.add("peak_memory_gib")
    values = {run.experiment: defaultdict(dict) for run in [*runs, *timed]}
    for source, for_times in ((runs, False), (timed, True)):
        for run in source:
            for name, value in (run.averages() | run.staged_losses(epochs)).items():
                if name not in left_out and (name in TIMES) == for_times:
                    values[run.experiment][name][run.settings["seed"]] = value
    return Results(runs, start, epochs, values, notes, sweep)


def parse_args(description: str, output: str) -> tuple[Results, Path]:
    """The results that the command line names, and the folder to write to, which it makes."""
    parser = ArgumentParser(description=f"{description}, from the records of runs, finished or not")
    parser.add_argument("runs", nargs="+", type=Path, help="outputs of run_all.sh or train.py")
    timing = "take the times from these runs, for when the others shared their machine"
    parser.add_argument("--timing", type=Path, metavar="RUNS", help=timing)
    swept = "compare the values of this setting, in the output of run_all.sh --sweep"
    parser.add_argument("--sweep", default="", metavar="NAME", help=swept)
    where = f"where to write (default: RUNS/{output})"
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)
    args = parser.parse_args()
    results = read_results(args.runs, args.timing, args.sweep)
    folder = args.output or args.runs[0] / output
    make_folder(folder)
    return results, folder


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = (" | ".join(map(str.rjust, row, widths)) for row in (rows[0], rule, *rows[1:]))
    return "\n".join(f"| {line} |" for line in lines)
