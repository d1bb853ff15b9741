"""From filelists to batches on the device: clips, mels, batches of indices, padded batches.

filelists --load_data--> clips --open_mels--> mels --MelDataset, load_ahead--> Batch
"""

import hashlib
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from batching import STRATEGIES, EpochBatchSampler, plan_batches
from cli import UserError, expand_path, make_folder, replace_file
from corpus.audio import MelSpectrogram, encode_npy
from corpus.clips import (
    Clip,
    Problem,
    check_samples,
    map_in_threads,
    padded_frames,
    raise_problems,
    read_clips,
    read_samples,
    read_speak_texts,
    report_unknown_characters,
)
from hparams import AUDIO, HParams
from layers import length_mask
from text import text_to_sequence, training_cleaners

MAX_SKIPPED = 0.01  # share of a set's clips that on_bad_clip=skip leaves out
MEL_VERSION = 1  # raise it when MelSpectrogram changes its values: old files are then ignored
NPY_HEADER = 128  # bytes that np.save writes before the numbers
VALIDATION_SEED = 1234  # the same validation batches for every strategy

Mels = Callable[[Clip], np.ndarray]  # a clip's log-mel, (T_out, n_mels) float32
Fingerprint = list[list[tuple[int, int]]]  # see data_fingerprint()


class Clips(NamedTuple):
    """The two sets of a run."""

    train: list[Clip]
    val: list[Clip]


class Data(NamedTuple):
    """All that a run trains on."""

    train_set: "MelDataset"
    val_set: "MelDataset"
    sampler: EpochBatchSampler  # of the training batches
    val_batches: list[list[int]]
    texts: list[list[int]]  # symbol ids of speak_texts; none if speak_every is 0
    fingerprint: Fingerprint


def open_data(clips: Clips, hparams: HParams, rank: int, world_size: int) -> Data:
    """Returns the data of a run, after filling the mel cache, if it is used.

    Args:
        rank, world_size: of the processes that train one model; each gets its share of the batches.

    Raises:
        UserError: a setting does not go with the clips, or their mels cannot be computed.
    """
    texts = read_speak_texts(hparams)
    sampler = training_sampler(clips.train, hparams, rank, world_size)
    mels = open_mels([*clips.train, *clips.val], hparams)
    return Data(
        MelDataset(clips.train, mels, hparams.n_frames_per_step),
        MelDataset(clips.val, mels, hparams.n_frames_per_step),
        sampler,
        validation_batches(clips.val, hparams),
        texts,
        data_fingerprint(clips),
    )


def data_fingerprint(clips: Clips) -> Fingerprint:
    """Returns the frames of each clip and a checksum of its text, in order, but not where its
    file is."""
    return [[(c.n_frames, zlib.crc32(repr(c.ids).encode())) for c in part] for part in clips]


def check_same_data(clips: Clips, saved: Fingerprint, path: Path) -> None:
    """Raises :class:`UserError` unless ``clips`` are those that the checkpoint ``path`` was trained
    on, whose fingerprint is ``saved``."""
    if data_fingerprint(clips) != saved:
        raise UserError(
            f"{path}: was trained on clips of other texts, lengths or order than the filelists now "
            "list; restore them, or start another run by -c and another -o"
        )


# Clips


def load_data(hparams: HParams) -> Clips:
    """Returns the training and the validation clips, checked: lists, texts, headers, and the
    samples of clips whose mels are not cached.

    Raises:
        UserError: a setting is wrong, or a list cannot be read; or all problems of clips, one per
            line. With ``on_bad_clip=skip`` bad clips are printed and left out, unless they are more
            than 1 % of a set.
    """
    locations = {}  # of the sound files in both sets, by path
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

    cache = MelCache(hparams)
    unchecked = cache.missing if hparams.cache_mels else list  # all
    train_problems += find_too_long(train, hparams) + check_samples(unchecked(train))
    val_problems += check_samples(unchecked(val))
    if hparams.on_bad_clip == "error":
        raise_problems(train_problems + val_problems)
    train = leave_out(train, train_problems, hparams.training_files)
    val = leave_out(val, val_problems, hparams.validation_files)
    trained_on = {tuple(clip.ids) for clip in train}
    if n_shared := sum(tuple(clip.ids) in trained_on for clip in val):
        print(
            f"note: {n_shared:,} of the {len(val):,} validation clips have texts that are trained "
            "on, so losses say less of other texts; scripts/prepare_corpus.py keeps them apart"
        )
    cleaners = training_cleaners(hparams.text_cleaners)  # may leave some words in letters
    ids = [text_to_sequence(clip.text, cleaners, hparams.symbols) for clip in train]
    return Clips([clip._replace(ids=i) for clip, i in zip(train, ids, strict=True)], val)


def leave_out(clips: Sequence[Clip], problems: Sequence[Problem], filelists: str) -> list[Clip]:
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


def batch_capacity(hparams: HParams) -> int | None:
    """Returns the frames that a batch may have, with padding; None if neither setting is given."""
    if hparams.batch_capacity_seconds:
        frames = hparams.batch_capacity_seconds * hparams.sampling_rate / hparams.hop_length
        return int(frames + 1e-6)  # a whole number, computed in floating point, may fall short
    return hparams.batch_capacity or None


def find_too_long(clips: Sequence[Clip], hparams: HParams) -> list[Problem]:
    """Returns a problem for each clip that is longer than the batch capacity."""
    capacity = batch_capacity(hparams) or math.inf
    too_long = [clip for clip in clips if padded_frames(clip, hparams) > capacity]
    longest = max((padded_frames(clip, hparams) for clip in too_long), default=0)
    setting = f"batch_capacity={longest}"
    if hparams.batch_capacity_seconds:
        seconds = longest * hparams.hop_length / hparams.sampling_rate
        setting = f"batch_capacity_seconds={math.ceil(seconds * 100) / 100}"
    fix = f"set {setting} or more, or remove the line"
    problems = []
    for clip in too_long:
        limit = f"has {padded_frames(clip, hparams)} frames, above the batch capacity of {capacity}"
        problems.append(Problem(clip.location, "long", f"{clip.path} {limit}; {fix}"))
    return problems


# Mels


def open_mels(clips: Sequence[Clip], hparams: HParams) -> Mels:
    """Computes the mels that the cache lacks, and returns a function that reads the mel of a clip
    from the cache. With ``cache_mels=False`` the function computes the mel at every call.

    Raises:
        UserError: the cache cannot be written, or samples cannot be used. The function raises it
            too, if a file has changed in the meantime.
    """
    cache = MelCache(hparams)
    missing = cache.missing(clips) if hparams.cache_mels else []
    if hparams.cache_mels and not missing:
        return cache
    spectrogram = MelSpectrogram(hparams)

    def compute(clip: Clip) -> np.ndarray:
        samples = torch.from_numpy(read_samples(clip))
        return spectrogram(samples).T.contiguous().numpy()

    if not hparams.cache_mels:
        return compute
    make_folder(cache.folder, "set mel_cache_dir to another folder")
    map_in_threads(lambda clip: cache.save(clip, compute(clip)), missing, "mels")
    return cache


class MelCache:
    """Keeps mels in ``mel_cache_dir``, one file a clip, named by a hash of all that it depends on:
    the audio settings, and the sound file's path, size and time of last change.

    Files are never changed, so several runs may fill the folder together. Anyone may delete it.
    """

    def __init__(self, hparams: HParams) -> None:
        self.folder, self.n_mels = expand_path(hparams.mel_cache_dir), hparams.n_mel_channels
        self.audio = [MEL_VERSION, *(getattr(hparams, name) for name in AUDIO)]

    def path(self, clip: Clip) -> Path:
        key = f"{self.audio} {clip.stamp.size} {clip.stamp.mtime} {os.path.abspath(clip.path)}"
        return self.folder / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npy"

    def missing(self, clips: Sequence[Clip]) -> list[Clip]:
        """Returns the clips that are not cached. The samples of all others have been checked."""
        return [clip for clip in clips if not self.has(clip)]

    def has(self, clip: Clip) -> bool:
        try:
            return os.stat(self.path(clip)).st_size == NPY_HEADER + 4 * self.n_mels * clip.n_frames
        except OSError:
            return False

    def save(self, clip: Clip, mel: np.ndarray) -> None:
        # A mel that is lost is made again.
        with replace_file(self.path(clip), durable=False) as file:
            file.write(encode_npy(mel))

    def __call__(self, clip: Clip) -> np.ndarray:
        path = self.path(clip)
        if not self.has(clip):
            raise UserError(f"{path}: changed or removed while in use; run again to rebuild it")
        return np.load(path)


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
        strategy=hparams.batching_strategy,
        batch_size=hparams.batch_size,
        dynamic_batch_size=hparams.dynamic_batch_size,
        batch_randomization=hparams.batch_randomization,
        capacity=batch_capacity(hparams),
        seed=hparams.seed,
        num_replicas=world_size,
        rank=rank,
        **{name: getattr(hparams, name) for name in STRATEGIES[hparams.batching_strategy].settings},
    )


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
