"""Reads what runs of train.py recorded: which of them can be compared, and their losses.

A run is its output folder: hparams.json has its settings, metrics.jsonl its records.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli import UserError
from hparams import MAY_CHANGE, HParams
from scripts.paper import BATCHING, EXPERIMENTS, PAPER_EPOCHS, PAPER_STAGES, experiment_name

# The batching settings that compared runs may differ in. LRF is not one of them: bucket_size and
# n_bins are chosen to match its padding.
CHOICE = {*BATCHING, "bucket_size", "n_bins", "bucket_edges", "n_buckets"}
# Settings that any two runs may differ in. Filelists may have moved: the number of frames in an
# epoch tells whether two runs had the same clips.
IGNORED = {*MAY_CHANGE, "training_files", "validation_files"} - {"epochs_per_validation"}
LEAST_VALIDATIONS = 4  # smoothing three or fewer would average all of them
# What a run's times depend on. train.py records it in a "start" event, at each start or resume.
CONDITIONS = ("device", "threads", "decoder", "precision", "torch")
AVERAGES = {  # name: its name in "epoch" records, and how it is averaged over them
    "n_batches": ("n_batches", fmean),
    "total_length": ("total_length", fmean),
    "zpr": ("zpr", lambda rates: 100 * fmean(rates)),  # percent
    "abl": ("abl", fmean),
    "minutes": ("minutes", median),  # which other work on the machine affects less
    "speed": ("frames_per_second", median),
    "memory": ("peak_memory_gib", max),
}
REQUIRED = {  # what records of an event must have
    "epoch": {name for name, _ in AVERAGES.values()},
    "validation": {"loss", "masked_loss", "diagonality"},
}


class Run(NamedTuple):
    """What train.py recorded of one training, finished or not."""

    path: Path
    settings: dict[str, Any]
    epochs: list[dict[str, Any]]  # the records of "epoch" events
    validations: list[dict[str, Any]]  # the records of "validation" events
    conditions: list[tuple[str, ...]]  # its CONDITIONS, more than once if it was resumed

    @property
    def experiment(self) -> str:
        return experiment_name(self.settings)

    @property
    def order(self) -> tuple[int, str, int]:
        """Sorts the paper's experiments as its Table 2 does, then others, each by seed."""
        ranks = {name: rank for rank, name in enumerate(EXPERIMENTS)}
        rank = ranks.get(self.experiment, len(ranks))
        return rank, self.experiment, self.settings["seed"]

    def averages(self) -> dict[str, float]:
        """The AVERAGES over the epochs so far; empty before the first has ended."""
        values = {}
        for name, (recorded, average) in AVERAGES.items() if self.epochs else ():
            values[name] = average([record[recorded] for record in self.epochs])
        return values


# Reading


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without a last line that is still being written.

    Raises:
        UserError: there is no such file, or train.py of this version did not write it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        records = [dict(json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", error)
        raise UserError(f"{path}: cannot be read ({reason}); name an output of train.py") from None
    for record in records:
        required = {"event", "epoch"} | REQUIRED.get(record.get("event"), set())
        if missing := required - set(record):
            raise UserError(f"{path}: a record has no {min(missing)}; train the run again")
    return records


def load_settings(path: Path) -> dict[str, Any]:
    """The settings in a run's hparams.json.

    Raises:
        UserError: there are none, or this version does not know them.
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
    """The run whose output folder is ``path``; :class:`UserError` if it cannot be read."""
    run = Run(path, load_settings(path), [], [], [])
    file = path / "metrics.jsonl"
    starts = []  # since the last epoch
    for record in read_metrics(file) if file.exists() else []:  # a new run has none yet
        if record["event"] == "start":
            starts.append(record)
        elif record["event"] == "validation":
            run.validations.append(record)
        elif record["event"] == "epoch":
            run.epochs.append(record)
            if not starts and not run.conditions:
                starts = [run.settings]  # older versions recorded no start
            for start in starts:
                run.conditions.append(tuple(str(start.get(c, "unknown")) for c in CONDITIONS))
            starts = []
    return run


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """The runs that are or lie in ``folders``, and what is wrong with those that are unreadable."""
    runs, problems = [], []
    for folder in folders:
        paths = sorted(path.parent for path in folder.rglob("hparams.json"))
        if not paths:
            problems.append(f"{folder}: holds no run; name the output of run_all.sh or train.py")
        readable = []
        for path in paths:
            try:
                readable.append(load_run(path))
            except UserError as error:
                problems.append(str(error))
        runs += sorted(readable, key=lambda run: run.order)
    return runs, problems


# Comparing


def load_comparable(folders: Iterable[Path]) -> list[Run]:
    """All runs in ``folders``, in order.

    Raises:
        UserError: a folder has no run, a run cannot be read, an experiment has a seed twice, or
            runs differ in more than their batching.
    """
    runs, problems = find_runs(folders)
    if problems:
        raise UserError("\n".join(problems))
    runs.sort(key=lambda run: run.order)
    for first, second in itertools.combinations(runs, 2):
        if first.order == second.order:
            raise UserError(
                f"{first.path} and {second.path}: are both {first.experiment} with seed "
                f"{first.settings['seed']}; name folders that hold it once"
            )
        same = first.experiment == second.experiment
        require_comparable(first, second, set() if same else CHOICE)
    return runs


def require_comparable(first: Run, second: Run, exempt: set[str]) -> None:
    """Raise :class:`UserError` if two runs differ in more than the seed and settings ``exempt``."""
    if reason := inequality(first, second, {"seed", *exempt}):
        raise UserError(
            f"{first.path} and {second.path}: {reason}; compare runs that differ only in batching"
        )


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


def unequal_conditions(runs: Iterable[Run]) -> str | None:
    """Which runs trained under which CONDITIONS; None if all trained under the same.

    An unknown condition equals only another unknown one.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        for conditions in dict.fromkeys(run.conditions):
            groups.setdefault(conditions, []).append(str(run.path))
    if len(groups) < 2:
        return None
    parts = []
    for conditions, paths in groups.items():
        named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        columns = zip(CONDITIONS, conditions, zip(*groups, strict=True), strict=True)
        varying = [f"{name}={value}" for name, value, column in columns if len(set(column)) > 1]
        parts.append(f"{named} trained with {', '.join(varying)}")
    return "; ".join(parts)


# Losses


class Series(NamedTuple):
    """The validations that a run of ``planned`` epochs makes."""

    planned: int
    epochs: list[int]  # completed at each validation
    stages: list[int]  # indices into epochs of VL1, VL2 and VL3


def plan_series(runs: Sequence[Run]) -> Series:
    """Stages are the paper's fractions of the epochs: 100, 160 and 220 of 220."""
    planned = max(run.settings["epochs"] for run in runs)
    every = runs[0].settings["epochs_per_validation"]  # the same in all
    epochs = [e for e in range(1, planned + 1) if e % every == 0 or e == planned]
    targets = [planned * stage / PAPER_EPOCHS for stage in PAPER_STAGES]
    stages = [min(range(len(epochs)), key=lambda i: abs(epochs[i] - t)) for t in targets]
    return Series(planned, epochs, stages)


def losses_of(run: Run, series: Series, name: str = "loss") -> list[float]:
    """The run's validation losses, up to the first that is missing or not finite."""
    by_epoch = {record["epoch"] + 1: record[name] for record in run.validations}
    losses = [by_epoch.get(epoch, math.nan) for epoch in series.epochs]
    return list(itertools.takewhile(math.isfinite, losses))


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss averaged with the previous and the next, where there are (Sec. 6)."""
    return [fmean(losses[max(i - 1, 0) : i + 2]) for i in range(len(losses))]


def staged_losses(run: Run, series: Series) -> dict[str, float]:
    """VL1, VL2, VL3 and VLavg, as far as they are known, of the loss and of the masked loss."""
    values = {}
    for prefix, name in (("vl", "loss"), ("masked", "masked_loss")):
        losses = losses_of(run, series, name)
        complete = len(losses) == len(series.epochs)
        known = smoothed(losses)[: None if complete else -1]  # the newest still lacks its next
        for number, stage in enumerate(series.stages, start=1):
            if stage < len(known):
                values[f"{prefix}{number}"] = known[stage]
        if complete:
            values[f"{prefix}_avg"] = fmean(losses[series.stages[0] :])
    return values
