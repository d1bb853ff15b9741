"""The learning rate over a run, and the end of a run of so many hours: pure functions of numbers.

A position in a run counts epochs: 2.5 is the middle of the third one.
"""

import math
from collections.abc import Sequence
from itertools import takewhile
from statistics import fmean
from typing import NamedTuple

SIMILAR = 0.1  # epochs whose times differ by at most this share tell of the same speed


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


def seconds_per_epoch(training_seconds: Sequence[float], total_seconds: float) -> float:
    """Predicts how long an epoch takes, with its share of validating and saving.

    The latest epochs count, back to where the speed of the machine last changed.

    Args:
        training_seconds: of each epoch so far, without validating and saving.
        total_seconds: of the run so far, with both.
    """
    *_, latest = training_seconds
    recent = takewhile(
        lambda seconds: abs(seconds / latest - 1) <= SIMILAR, reversed(training_seconds)
    )
    return fmean(recent) * max(1.0, total_seconds / sum(training_seconds))


def fall_in_time(
    epoch: int, epoch_seconds: float, total_seconds: float, limit_seconds: float, share: float
) -> Fall | None:
    """Decides after ``epoch`` epochs whether the learning rate falls from here on, so that it falls
    over the last ``share`` of ``limit_seconds``.

    Returns:
        the fall, whose end is as near to the limit as whole epochs come; None while it is too
        early. It has one epoch at least, unless no time is left.
    """
    rest = limit_seconds - total_seconds
    fall_seconds = max(share * limit_seconds, epoch_seconds if share else 0.0)
    if rest - epoch_seconds / 2 > fall_seconds:
        return None
    least = 1 if share and rest > 0 else 0
    return Fall(epoch, epoch + max(least, round(rest / epoch_seconds)))
