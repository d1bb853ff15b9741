"""From settings to batches: the training and the validation clips, and their batches.

filelists --load_data--> clips --open_mels--> mels --MelDataset, load_ahead--> Batch
"""

import dataclasses
import math
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from batching import EpochBatchSampler, plan_batches
from cli import UserError
from corpus.clips import (
    Clip,
    Problem,
    check_samples,
    check_text,
    read_clips,
    refuse,
    report_unknown_characters,
)
from corpus.mels import MelCache, Mels, open_mels
from hparams import HParams
from layers import length_mask

VALIDATION_SEED = 1234  # the same validation batches for every strategy
MAX_SKIPPED = 0.01  # of a set's clips, with on_bad_clip=skip


class Data(NamedTuple):
    """All that a run trains on."""

    train_set: "MelDataset"
    val_set: "MelDataset"
    sampler: EpochBatchSampler  # of the training batches
    val_batches: list[list[int]]
    texts: list[list[int]]  # symbol ids of speak_texts
    fingerprint: list[list[tuple[int, int]]]  # see data_fingerprint()


def open_data(
    train_clips: list[Clip],
    val_clips: list[Clip],
    hparams: HParams,
    rank: int = 0,
    world_size: int = 1,
) -> Data:
    """Returns the data of a run, after filling the mel cache, if it is used.

    Args:
        rank, world_size: of the processes that train one model; each gets its share of the batches.

    Raises:
        UserError: a setting does not go with the clips, or their mels cannot be computed.
    """
    texts = texts_to_speak(hparams)
    sampler = training_sampler(train_clips, hparams, rank, world_size)
    if note := capacity_note(sampler, hparams):
        print(f"note: {note}")
    mels = open_mels([*train_clips, *val_clips], hparams)
    return Data(
        MelDataset(train_clips, mels, hparams.n_frames_per_step),
        MelDataset(val_clips, mels, hparams.n_frames_per_step),
        sampler,
        validation_batches(val_clips, hparams),
        texts,
        data_fingerprint(train_clips, val_clips),
    )


def data_fingerprint(*sets: Sequence[Clip]) -> list[list[tuple[int, int]]]:
    """Returns, for each set's clips in order, frames and a checksum of the text. Where the files
    are is not in it."""
    return [[(c.n_frames, zlib.crc32(repr(c.ids).encode())) for c in clips] for clips in sets]


def refuse_other_data(
    saved: list[list[tuple[int, int]]], sets: Sequence[Sequence[Clip]], path: Path
) -> None:
    """Raises :class:`UserError` unless the clips of ``sets`` are those that the checkpoint ``path``
    was trained on, whose fingerprint is ``saved``."""
    if saved == (data := data_fingerprint(*sets)):
        return
    problem, what = "than the filelists now list", "the filelists"
    if [len(clips) for clips in saved] == [len(clips) for clips in data]:
        rows = zip(chain(*sets), chain(*saved), chain(*data), strict=True)
        (clip, then, now), *more = [row for row in rows if row[1] != row[2]]
        change = f"{now[0]} frames, and had {then[0]}" if now[0] != then[0] else "another text"
        more = f" (and {len(more):,} more differ)" if more else ""
        problem, what = f"than now: {clip.location}: {clip.path} has {change}{more}", "what it was"
    raise UserError(
        f"{path}: was trained on clips of other texts, lengths or order {problem}; restore {what}, "
        "or start another run by -c with another -o"
    )


# The two sets of clips


def load_data(hparams: HParams) -> tuple[list[Clip], list[Clip]]:
    """Returns the training and the validation clips, checked: lists, texts, headers, and the
    samples of those whose mels are not cached. Prints characters that have no symbol, and how many
    validation texts are trained on.

    Raises:
        UserError: all problems, one per line. With ``on_bad_clip=skip`` bad clips are printed and
            left out, unless they are more than 1 % of a set.
    """
    # Validation first, so that a clip in both sets is a problem of the training set.
    names = hparams.validation_files, hparams.training_files
    lists = [name.strip() for name in "+".join(names).split("+")]
    for i, name in enumerate(lists):
        if os.path.realpath(name) in map(os.path.realpath, lists[:i]):
            both = " and ".join(names)
            raise UserError(f"filelist '{name}': is named twice in {both}; use every clip once")
    sets, locations, unread = [], {}, []
    for filelists in names:
        try:
            sets.append(read_clips(filelists, hparams, locations))
        except UserError as error:  # a setting, or a list that cannot be read
            sets.append(([], []))
            unread.append(str(error))
    (val, val_problems), (train, train_problems) = sets
    problems = train_problems + val_problems
    if not (unread or train or val) and all("no such file" in p.message for p in problems):
        raise UserError(
            f"setting data_dir={hparams.data_dir}: has none of the clips that "
            f"{' and '.join(names)} list; use the folder that their paths start from"
        )
    report_unknown_characters(((clip.location, clip.text) for clip in train + val), hparams)

    cache = MelCache(hparams)
    train_problems += _too_long(train, hparams)
    for clips, problems in sets:
        problems += check_samples(cache.missing(clips) if hparams.cache_mels else clips, hparams)
        problems.sort(key=Problem.line)
    if unread or hparams.on_bad_clip == "error":
        refuse([*dict.fromkeys(unread), *train_problems, *val_problems])

    good = []
    for filelists, (clips, problems) in zip(names, sets, strict=True):
        bad = {problem.location for problem in problems}
        n_lines = len(bad | {clip.location for clip in clips})
        if len(bad) > MAX_SKIPPED * n_lines:
            cannot = f"{filelists}: {len(bad)} of {n_lines} clips cannot be used"
            limit = f"on_bad_clip=skip leaves out at most {MAX_SKIPPED:.0%}"
            refuse([*problems, f"{cannot}, and {limit}; fix them"])
        if bad:
            print(*(f"skipped: {problem}" for problem in problems), sep="\n")
            print(f"skipped {len(bad)} of the {n_lines:,} clips of {filelists}")
        good.append([clip for clip in clips if clip.location not in bad])
    val, train = good
    trained_on = {tuple(clip.ids) for clip in train}
    if n := sum(tuple(clip.ids) in trained_on for clip in val):
        print(
            f"note: {n:,} of the {len(val):,} validation clips have texts that are trained on, so "
            "losses say less of other texts; scripts/prepare_corpus.py keeps them apart"
        )
    return train, val


def _too_long(clips: Sequence[Clip], hparams: HParams) -> list[Problem]:
    """Reports the longest clip, if it exceeds the batch capacity. With ``on_bad_clip=skip``, every
    clip that does, since each is left out."""
    capacity = batch_capacity(hparams) or math.inf
    too_long = [clip for clip in clips if padded_frames(clip, hparams) > capacity]
    too_long.sort(key=lambda clip: clip.n_frames, reverse=True)
    if not too_long:
        return []
    n_frames = padded_frames(too_long[0], hparams)
    fix = f"batch_capacity={n_frames}"
    if hparams.batch_capacity_seconds:
        seconds = n_frames * hparams.hop_length / hparams.sampling_rate
        fix = f"batch_capacity_seconds={math.ceil(seconds * 100) / 100}"
    reported = too_long if hparams.on_bad_clip == "skip" else too_long[:1]
    n_more = len(too_long) - len(reported)
    more = f" (and {n_more:,} more clip{'s' * (n_more > 1)})" if n_more else ""
    return [
        Problem(
            clip.location,
            f"{clip.path} has {padded_frames(clip, hparams)} frames, above the batch capacity of "
            f"{capacity}{more}; set {fix} or more, or remove the line{'s' * bool(more)}",
        )
        for clip in reported
    ]


def texts_to_speak(hparams: HParams) -> list[list[int]]:
    """Returns the symbol ids of ``speak_texts``; none if ``speak_every`` is 0.

    Raises:
        UserError: one of them has nothing to speak, or cannot be read.
    """
    if not hparams.speak_every:
        return []
    if hparams.symbols and hparams.speak_texts == HParams.speak_texts:
        print("note: speak_texts is the default, in English; set it to sentences of your language")
    report_unknown_characters((("setting speak_texts", t) for t in hparams.speak_texts), hparams)
    try:
        return [check_text(text, hparams) for text in hparams.speak_texts]
    except UserError as error:
        raise UserError(f"setting speak_texts: {error}") from None


# Batches of indices


def training_sampler(
    clips: Sequence[Clip], hparams: HParams, rank: int = 0, world_size: int = 1
) -> EpochBatchSampler:
    """Returns the batches of every epoch, by the batching settings, or a process's share of them.

    Raises:
        UserError: a base batch size larger than the set.
    """
    if hparams.batch_size > len(clips):
        raise UserError(
            f"setting batch_size={hparams.batch_size}: {hparams.training_files} has {len(clips)} "
            f"clips; use at most {len(clips)}"
        )
    return EpochBatchSampler(
        [padded_frames(clip, hparams) for clip in clips],
        seed=hparams.seed,
        num_replicas=world_size,
        rank=rank,
        **batching_settings(hparams),
    )


def batching_settings(hparams: HParams) -> dict[str, Any]:
    """Returns the arguments of :func:`batching.plan_batches` but the lengths, seed and epoch."""
    return {
        "strategy": hparams.batching_strategy,
        "batch_size": hparams.batch_size,
        "dynamic_batch_size": hparams.dynamic_batch_size,
        "batch_randomization": hparams.batch_randomization,
        "capacity": batch_capacity(hparams),
        "longest_first": hparams.longest_first,
        "lrf": hparams.lrf,
        "bucket_size": hparams.bucket_size,
        "bucket_edges": hparams.bucket_edges,
        "n_buckets": hparams.n_buckets,
        "n_bins": hparams.n_bins,
    }


def padded_frames(clip: Clip, hparams: HParams) -> int:
    """Returns a clip's frames, rounded up to whole decoder steps, as batches have them."""
    return clip.n_frames + -clip.n_frames % hparams.n_frames_per_step


def frames_of_steps(sampler: EpochBatchSampler, clips: Sequence[Clip]) -> np.ndarray:
    """Returns the frames of each process's batch at each training step of the epoch, with padding
    and without: (n_training_steps, n_processes, 2)."""
    n_frames = np.array([clip.n_frames for clip in clips])
    frames = [
        (len(batch) * sampler.lengths[batch].max(), n_frames[batch].sum()) for batch in sampler.plan
    ]
    return np.array(frames)[sampler.steps]


def validation_batches(clips: Sequence[Clip], hparams: HParams) -> list[list[int]]:
    """Returns RAND with the base batch size (Sec. 6): the same batches for every strategy."""
    lengths = [clip.n_frames for clip in clips]
    fixed = {"dynamic_batch_size": False, "batch_randomization": False, "seed": VALIDATION_SEED}
    plan = plan_batches(lengths, "RAND", hparams.batch_size, **fixed)
    return [indices.tolist() for indices in plan]


def batch_capacity(hparams: HParams) -> int | None:
    """Returns the frames that a batch may have, with padding; None if neither setting is given."""
    if hparams.batch_capacity_seconds:
        return int(hparams.batch_capacity_seconds * hparams.sampling_rate / hparams.hop_length)
    return hparams.batch_capacity or None


def capacity_note(sampler: EpochBatchSampler, hparams: HParams) -> str:
    """Warns that the longest clip makes dynamic batches so large that an epoch has fewer than half
    as many as with ``batch_size`` clips in each, and suggests a capacity; "" if it does not, or if
    the capacity was chosen."""
    lengths, n_batches = sampler.lengths, len(sampler.plan)
    n_fixed = math.ceil(len(lengths) / hparams.batch_size)
    if not hparams.dynamic_batch_size or batch_capacity(hparams) or 2 * n_batches >= n_fixed:
        return ""
    hop_seconds = hparams.hop_length / hparams.sampling_rate
    longest = int(lengths.max()) * hop_seconds
    # LJSpeech's longest clip has 1.5 times the mean length.
    seconds = math.ceil(max(1.5 * lengths.mean() * hop_seconds * hparams.batch_size, longest))
    capacity = batch_capacity(dataclasses.replace(hparams, batch_capacity_seconds=float(seconds)))
    settings = batching_settings(hparams) | {"seed": hparams.seed, "capacity": capacity}
    return (
        f"an epoch has {n_batches:,} batches, with dynamic_batch_size=False {n_fixed:,}: the "
        f"longest clip, of {longest:.1f} s, sets the batch capacity, and most are far shorter. "
        f"With fewer updates an epoch teaches less: batch_capacity_seconds={seconds} makes "
        f"{len(plan_batches(lengths, **settings)):,}"
    )


# Batches of clips


class Item(NamedTuple):
    """A clip of a dataset, before padding."""

    index: int
    ids: Tensor  # (T_in,) int64
    mel: Tensor  # (T_out, n_mels) float32


class Batch(NamedTuple):
    """Clips, the longest text first, padded with zeros. T_out is n_steps x n_frames_per_step."""

    text: Tensor  # (B, T_in) int64
    text_lengths: Tensor  # (B,) int64, descending
    mel: Tensor  # (B, n_mels, T_out) float32 log-mels
    mel_lengths: Tensor  # (B,) int64
    gate: Tensor  # (B, n_steps) float32: 1 from the step on that has the clip's last frame
    cpu_text_lengths: Tensor  # (B,) on the CPU, so that packing does not wait for the GPU
    indices: list[int]  # B, of the clips in the dataset

    def pin_memory(self) -> "Batch":
        """Returns the batch in pinned memory, from which a GPU copies without waiting."""
        pinned = (tensor.pin_memory() for tensor in self[:5])
        return Batch(*pinned, self.cpu_text_lengths, self.indices)

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch on ``device``. The copy from pinned memory is not waited for."""
        moved = (tensor.to(device, non_blocking=True) for tensor in self[:5])
        return Batch(*moved, self.cpu_text_lengths, self.indices)


class MelDataset(Dataset):
    """``dataset[i]`` is clip ``i`` as an :class:`Item`. Batches are made of whole decoder steps."""

    def __init__(self, clips: Sequence[Clip], mels: Mels, n_frames_per_step: int = 1) -> None:
        self.clips, self.mels, self.n_frames_per_step = clips, mels, n_frames_per_step

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, i: int) -> Item:
        mel = torch.from_numpy(self.mels(self.clips[i]))
        return Item(i, torch.tensor(self.clips[i].ids), mel)


def load_ahead(
    dataset: MelDataset,
    batches: Iterable[Sequence[int]],
    device: torch.device | None = None,
    num_threads: int = 1,
) -> Iterator[Batch]:
    """Yields ``batches`` of indices as :class:`Batch`, in order. Threads load the next ones, into
    pinned memory for a GPU, while the caller trains on one.

    Args:
        num_threads: also how many batches are loaded ahead.
    """
    on_gpu = device is not None and device.type == "cuda"

    def load(indices: Sequence[int]) -> Batch:
        batch = collate([dataset[i] for i in indices], dataset.n_frames_per_step)
        try:
            return batch.pin_memory() if on_gpu else batch
        except RuntimeError as error:  # its message varies
            reason = str(error).partition("\n")[0]
            raise MemoryError(f"no memory can be pinned for a batch ({reason})") from None

    # Without this, a new thread would pin memory through the first GPU.
    initializer = partial(torch.cuda.set_device, device) if on_gpu else None
    pool, waiting = ThreadPoolExecutor(num_threads, initializer=initializer), deque()
    try:
        for indices in batches:
            waiting.append(pool.submit(load, indices))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def short_batch(dataset: MelDataset, device: torch.device) -> Batch:
    """Returns a batch of ten steps of two clips."""
    first, last, n_frames = dataset[0], dataset[-1], 10 * dataset.n_frames_per_step
    items = [
        first._replace(ids=first.ids[:20], mel=first.mel[:n_frames]),
        last._replace(ids=last.ids[:15], mel=last.mel[:n_frames]),
    ]
    return collate(items, dataset.n_frames_per_step).to(device)


def collate(items: Sequence[Item], n_frames_per_step: int = 1) -> Batch:
    """Returns items as a batch, padded to the longest text and the longest mel, which is rounded up
    to whole decoder steps."""
    items = sorted(items, key=lambda item: -len(item.ids))
    text_lengths = torch.tensor([len(item.ids) for item in items])
    mel_lengths = torch.tensor([len(item.mel) for item in items])
    text = pad_sequence([item.ids for item in items], batch_first=True)
    mel = pad_sequence([item.mel for item in items], batch_first=True).mT
    mel = F.pad(mel, (0, -mel.size(2) % n_frames_per_step)).contiguous()
    last = (mel_lengths - 1) // n_frames_per_step  # steps
    gate = (~length_mask(last, mel.size(2) // n_frames_per_step)).float()
    indices = [item.index for item in items]
    return Batch(text, text_lengths, mel, mel_lengths, gate, text_lengths, indices)
