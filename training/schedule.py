"""The learning rate over a run, and the end of a run of so many hours: pure functions of numbers.

A position in a run counts epochs: 2.5 is the middle of the third one.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

STEADY, SIMILAR = 0.1, 0.15  # differences of times, as shares, that are chance


class Fall(NamedTuple):
    """The last part of a run, in which the learning rate falls to 0."""

    start: float = math.inf  # position where it begins to fall; infinite until it is known
    end: float = math.inf  # epochs of the whole run


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
    """What a run knows of its time after an epoch."""

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
        the latest epochs, back to where two in a row show another speed of the machine."""
        now = fmean(self.training_seconds[-2:]) if self.is_steady else self.training_seconds[-1]
        latest = list(reversed(self.training_seconds))
        differs = [abs(seconds / now - 1) > SIMILAR for seconds in latest]
        changes = (i for i, two in enumerate(pairwise(differs)) if all(two))
        n = next(changes, len(latest))
        return fmean(latest[:n]) * max(1.0, self.total_seconds / sum(self.training_seconds))


def fall_in_time(epoch: int, clock: Clock, limit_seconds: float, share: float) -> Fall | None:
    """Decides after ``epoch`` epochs whether the learning rate falls from here on, so that it falls
    over the last ``share`` of ``limit_seconds``.

    If the machine has just become faster or slower, it waits for the next epoch, but not beyond
    half of the fall.

    Returns:
        the fall, whose end is as near to the limit as whole epochs come; None while it is too
        early. It has one epoch at least, unless no time is left.
    """
    rest, epoch_seconds = limit_seconds - clock.total_seconds, clock.epoch_seconds
    fall_seconds = max(share * limit_seconds, epoch_seconds if share else 0.0)
    if rest - epoch_seconds / 2 > fall_seconds:
        return None
    if not clock.is_steady and rest > max(fall_seconds / 2, 2 * epoch_seconds):
        return None
    least = 1 if share and rest > 0 else 0
    return Fall(epoch, epoch + max(least, round(rest / epoch_seconds)))
