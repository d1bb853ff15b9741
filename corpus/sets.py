"""The training and the validation clips: what the two sets of a run must pass before it begins."""

import math
import os
from collections.abc import Sequence
from itertools import chain

from cli import UserError, pluralize
from corpus.clips import (
    Clip,
    Problem,
    check_samples,
    padded_frames,
    read_clips,
    read_lines,
    raise_problems,
    report_unknown_characters,
    split_names,
)
from corpus.mels import MelCache
from hparams import HParams
from text import text_to_sequence, training_cleaners

MAX_SKIPPED = 0.01  # share of a set's clips that on_bad_clip=skip leaves out


def load_data(hparams: HParams) -> tuple[list[Clip], list[Clip]]:
    """Returns the training and the validation clips, checked: lists, texts, headers, and the
    samples of clips whose mels are not cached.

    Raises:
        UserError: a setting is wrong, or a list cannot be read; or all problems of clips, one per
            line. With ``on_bad_clip=skip`` bad clips are printed and left out, unless they are more
            than 1 % of a set.
    """
    _check_lists(hparams)
    locations = {}
    # Validation first, so that a clip in both sets is a problem of the training set.
    val, val_problems = read_clips(hparams.validation_files, hparams, locations)
    train, train_problems = read_clips(hparams.training_files, hparams, locations)
    problems = train_problems + val_problems
    if not (train or val) and all(problem.kind == "missing" for problem in problems):
        lists = f"{hparams.validation_files} and {hparams.training_files}"
        problem = f"has none of the clips, such as {problems[0].message.partition(': ')[0]}"
        fix = f"use the folder from which the paths in {lists} start"
        raise UserError(f"setting data_dir={hparams.data_dir}: {problem}; {fix}")
    report_unknown_characters(((clip.location, clip.text) for clip in train + val), hparams)

    train_problems += _too_long(train, hparams) + check_samples(_unread(train, hparams), hparams)
    val_problems += check_samples(_unread(val, hparams), hparams)
    if hparams.on_bad_clip == "error":
        raise_problems(train_problems + val_problems)
    train = _without_bad_clips(train, train_problems, hparams.training_files)
    val = _without_bad_clips(val, val_problems, hparams.validation_files)
    _note_texts_in_both(train, val)
    return [_as_trained(clip, hparams) for clip in train], val


def _as_trained(clip: Clip, hparams: HParams) -> Clip:
    """Returns a clip with the symbols that the model is to train on."""
    cleaners = training_cleaners(hparams.text_cleaners)
    return clip._replace(ids=text_to_sequence(clip.text, cleaners, hparams.symbols))


def _check_lists(hparams: HParams) -> None:
    """Raises :class:`UserError` for filelists that cannot be read, or are named twice."""
    settings = hparams.training_files, hparams.validation_files
    seen, unreadable = set(), []
    for name in chain(*map(split_names, settings)):
        path = os.path.realpath(name)
        if path in seen:
            problem = f"is named twice in {' and '.join(settings)}; use every clip once"
            raise UserError(f"filelist '{name}': {problem}")
        seen.add(path)
        try:
            read_lines(name)
        except UserError as error:
            unreadable.append(str(error))
    if unreadable:
        raise UserError("\n".join(unreadable))


def _unread(clips: Sequence[Clip], hparams: HParams) -> Sequence[Clip]:
    """Returns the clips whose samples have not been checked: all but those with a mel on disk."""
    return MelCache(hparams).missing(clips) if hparams.cache_mels else clips


def _without_bad_clips(
    clips: Sequence[Clip], problems: Sequence[Problem], filelists: str
) -> list[Clip]:
    """Returns the clips without problems, and prints the problems of the others. Raises them as
    one :class:`UserError` if they are of more than ``MAX_SKIPPED`` of the lines."""
    bad = {problem.location for problem in problems}
    n_lines = len(bad | {clip.location for clip in clips})
    if len(bad) > MAX_SKIPPED * n_lines:
        count = f"{len(bad)} of {n_lines} clips cannot be used"
        limit = f"on_bad_clip=skip leaves out at most {MAX_SKIPPED:.0%}"
        raise_problems(problems, f"{filelists}: {count}, and {limit}; fix them")
    for problem in sorted(problems, key=Problem.line):
        print(f"skipped: {problem}")
    if bad:
        print(f"skipped {len(bad)} of the {n_lines:,} clips of {filelists}")
    return [clip for clip in clips if clip.location not in bad]


def _note_texts_in_both(train: Sequence[Clip], val: Sequence[Clip]) -> None:
    trained_on = {tuple(clip.ids) for clip in train}
    if n_shared := sum(tuple(clip.ids) in trained_on for clip in val):
        print(
            f"note: {n_shared:,} of the {len(val):,} validation clips have texts that are trained "
            "on, so losses say less of other texts; scripts/prepare_corpus.py keeps them apart"
        )


# The batch capacity


def batch_capacity(hparams: HParams) -> int | None:
    """Returns the frames that a batch may have, with padding; None if neither setting is given."""
    if hparams.batch_capacity_seconds:
        frames = hparams.batch_capacity_seconds * hparams.sampling_rate / hparams.hop_length
        return int(frames + 1e-6)  # a whole number, computed in floating point, may fall short
    return hparams.batch_capacity or None


def _too_long(clips: Sequence[Clip], hparams: HParams) -> list[Problem]:
    """Reports the longest clip, if it exceeds the batch capacity. With ``on_bad_clip=skip``,
    reports every clip that does, since each is left out."""
    capacity = batch_capacity(hparams) or math.inf
    too_long = [clip for clip in clips if padded_frames(clip, hparams) > capacity]
    if not too_long:
        return []
    too_long.sort(key=lambda clip: clip.n_frames, reverse=True)
    n_frames = padded_frames(too_long[0], hparams)
    setting = f"batch_capacity={n_frames}"
    if hparams.batch_capacity_seconds:
        seconds = n_frames * hparams.hop_length / hparams.sampling_rate
        setting = f"batch_capacity_seconds={math.ceil(seconds * 100) / 100}"
    fix = f"set {setting} or more, or remove the line"
    reported = too_long if hparams.on_bad_clip == "skip" else too_long[:1]
    if n_more := len(too_long) - len(reported):
        fix += f"s of it and {pluralize(n_more, 'more clip')}"
    problems = []
    for clip in reported:
        limit = f"has {padded_frames(clip, hparams)} frames, above the batch capacity of {capacity}"
        problems.append(Problem(clip.location, "long", f"{clip.path} {limit}; {fix}"))
    return problems
