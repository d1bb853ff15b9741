"""How far a run has come, its learning rate, and the end of a run of so many hours.

A position in a run counts epochs: 2.5 is the middle of the third one.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

STEADY, SIMILAR = 0.1, 0.15  # relative differences between times that may be chance


class Fall(NamedTuple):
    """The last part of a run, in which the learning rate falls to 0."""

    start: float = math.inf  # position where it begins to fall; infinite until it is known
    end: float = math.inf  # epochs of the whole run


@dataclasses.dataclass
class Progress:
    """How far a run has come, counted between two of its batches."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches done in this epoch
    step: int = 0  # optimizer steps done
    bad_steps: int = 0  # the latest steps in a row that were skipped
    best_loss: float = math.inf  # lowest validation loss so far
    best_alignment: float = 0.0  # highest validation diagonality so far
    metrics_size: int = 0  # size of metrics.jsonl in bytes
    seconds: float = 0.0  # of training, with validating and saving, without breaks
    epoch_seconds: list[float] = dataclasses.field(default_factory=list)  # training each epoch
    falls_from: float = math.inf  # position where the learning rate begins to fall, once known
    end: float = math.inf  # epochs of the whole run, once known
    peak_memory_gib: float = 0.0  # of this epoch
    sums: dict[str, float] = dataclasses.field(default_factory=dict)  # of this epoch

    def add(self, **values: float) -> None:
        """Adds to the sums of this epoch."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def next_epoch(self) -> "Progress":
        """Returns the progress at the start of the next epoch."""
        times = [*self.epoch_seconds, self.sums["seconds"]]
        return dataclasses.replace(
            self, epoch=self.epoch + 1, batch=0, epoch_seconds=times, peak_memory_gib=0.0, sums={}
        )

    @property
    def fall(self) -> Fall:
        """The last part of the run, in which the learning rate falls."""
        return Fall(self.falls_from, self.end)

    def plan_fall(self, fall: Fall) -> None:
        """Sets where the learning rate begins to fall and where the run ends."""
        self.falls_from, self.end = fall


def last_share(epochs: int, share: float) -> Fall:
    """Returns the last ``share`` of ``epochs``, from 0 to 1."""
    return Fall(epochs * (1 - share), epochs)


def learning_rate(highest: float, fall: Fall, position: float) -> float:
    """Returns the learning rate of the step that ends at ``position``: ``highest``, and during
    ``fall`` a line from there to 0, which the last step has."""
    if position <= fall.start:
        return highest
    return highest * (fall.end - position) / (fall.end - fall.start)


class Clock(NamedTuple):
    """How long a run has taken, measured after an epoch."""

    training_seconds: Sequence[float]  # of each epoch so far, without validating and saving
    total_seconds: float  # of the run so far, with both

    @property
    def is_steady(self) -> bool:
        """Whether the last two epochs took about as long as each other."""
        before, latest = self.training_seconds[-2:][0], self.training_seconds[-1]
        return abs(latest / before - 1) <= STEADY

    @property
    def epoch_seconds(self) -> float:
        """Predicts the seconds of an epoch, with its share of validating and saving: the mean of
        the latest epochs, without those before two in a row that took another time."""
        current = self.training_seconds[-1]
        if self.is_steady:
            current = fmean(self.training_seconds[-2:])
        latest = list(reversed(self.training_seconds))
        differs = [abs(seconds / current - 1) > SIMILAR for seconds in latest]
        changes = (i for i, two in enumerate(pairwise(differs)) if all(two))
        n = next(changes, len(latest))
        return fmean(latest[:n]) * max(1.0, self.total_seconds / sum(self.training_seconds))


def fall_in_time(epoch: int, clock: Clock, limit_seconds: float, share: float) -> Fall | None:
    """Decides after ``epoch`` epochs whether the learning rate falls from now on, so that it falls
    over the last ``share`` of ``limit_seconds``.

    If the machine has just become faster or slower, the decision waits for the next epoch, but not
    beyond half of the fall.

    Returns:
        the fall, which ends as near to the limit as whole epochs can; None while it is too early.
        It has at least one epoch, unless no time is left.
    """
    rest_seconds, epoch_seconds = limit_seconds - clock.total_seconds, clock.epoch_seconds
    fall_seconds = max(share * limit_seconds, epoch_seconds if share else 0.0)
    if rest_seconds - epoch_seconds / 2 > fall_seconds:
        return None
    if not clock.is_steady and rest_seconds > max(fall_seconds / 2, 2 * epoch_seconds):
        return None
    min_epochs = 1 if share and rest_seconds > 0 else 0
    return Fall(epoch, epoch + max(min_epochs, round(rest_seconds / epoch_seconds)))


def plan_end(progress: Progress, clock: Clock, limit_seconds: float, share: float) -> bool:
    """Decides after an epoch of a run that is limited by ``hours`` whether its learning rate begins
    to fall, which fixes its end. Returns whether it was decided just now."""
    if math.isfinite(progress.end):
        return False
    fall = fall_in_time(progress.epoch + 1, clock, limit_seconds, share)
    if fall:
        progress.plan_fall(fall)
    return fall is not None
