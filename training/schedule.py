"""How far a run has come, its learning rate, and the end of a run of so many hours.

A position in a run counts epochs: 2.5 is the middle of the third one.
"""

import dataclasses
import math
from typing import NamedTuple

from hparams import HParams


class Fall(NamedTuple):
    """The last part of a run, in which the learning rate falls to 0."""

    start: float = math.inf  # position where it begins to fall; infinite until it is known
    end: float = math.inf  # epochs of the whole run


@dataclasses.dataclass
class Progress:
    """How far a run has come, counted between two of its batches."""

    epoch: int = 0  # epochs done
    first_epoch: int = 0  # of this run, if it continues another run's checkpoint
    batch: int = 0  # batches done in this epoch
    step: int = 0  # optimizer steps done
    bad_steps: int = 0  # the latest steps in a row that were skipped
    best_loss: float = math.inf  # lowest validation loss so far
    best_alignment: float = 0.0  # highest validation diagonality so far
    metrics_size: int = 0  # size of metrics.jsonl in bytes
    seconds: float = 0.0  # of this run, with validating and saving, without breaks
    falls_from: float = math.inf  # position where the learning rate begins to fall, once known
    end: float = math.inf  # epochs of the whole run, once known
    peak_memory_gib: float = 0.0  # of this epoch
    sums: dict[str, float] = dataclasses.field(default_factory=dict)  # of this epoch

    def add(self, **values: float) -> None:
        """Adds to the sums of this epoch."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def begin_epoch(self) -> None:
        """Begins the next epoch."""
        self.epoch, self.batch, self.peak_memory_gib, self.sums = self.epoch + 1, 0, 0.0, {}

    @property
    def fall(self) -> Fall:
        """The last part of the run, in which the learning rate falls."""
        return Fall(self.falls_from, self.end)

    def plan_fall(self, fall: Fall) -> None:
        """Sets where the learning rate begins to fall and where the run ends."""
        self.falls_from, self.end = fall


def plan_epochs(hparams: HParams) -> Fall:
    """Returns the fall of a run of so many epochs. That of a run of so many hours is not known
    before it begins."""
    if hparams.hours:
        return Fall()
    return Fall(hparams.epochs * (1 - hparams.learning_rate_decay), hparams.epochs)


def learning_rate(highest: float, fall: Fall, position: float) -> float:
    """Returns the learning rate of the step that ends at ``position``: ``highest``, and during
    ``fall`` a line from there to 0, which the last step has."""
    if position <= fall.start:
        return highest
    return highest * (fall.end - position) / (fall.end - fall.start)


def plan_hours(epoch: int, rest_seconds: float, epoch_seconds: float, hparams: HParams) -> Fall:
    """Decides after ``epoch`` epochs whether the learning rate falls from now on, so that it falls
    over the last ``learning_rate_decay`` of ``hours``.

    Args:
        rest_seconds: what is left of the hours
        epoch_seconds: what an epoch is expected to take, with its share of validating and saving

    Returns:
        the fall, which ends as near to the limit as whole epochs can; or an unknown one while it is
        too early. It has at least one epoch, unless no time is left.
    """
    share = hparams.learning_rate_decay
    fall_seconds = max(share * 3600 * hparams.hours, epoch_seconds if share else 0.0)
    if rest_seconds - epoch_seconds / 2 > fall_seconds:
        return Fall()
    min_epochs = 1 if share and rest_seconds > 0 else 0
    return Fall(epoch, epoch + max(min_epochs, round(rest_seconds / epoch_seconds)))
