"""From settings to batches: the training and the validation clips, their batches, the loaders.

filelists --load_data--> clips --open_mels--> mels --MelDataset, collate--> Batch
"""

import hashlib
import inspect
import json
import math
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from batching import EpochBatchSampler, batch_statistics, plan_batches, solve_randomness
from cli import UserError
from clips import (
    Clip,
    Problem,
    check_samples,
    end_workers,
    read_clips,
    refuse,
    report_unknown_characters,
)
from hparams import HParams
from layers import length_mask
from mel_cache import MelCache, Mels

VALIDATION_SEED = 1234  # the same validation batches for every run, whatever its settings
MAX_SKIPPED = 0.01  # of a set's clips, with on_bad_clip=skip


# The two sets of clips


def load_data(hparams: HParams) -> tuple[list[Clip], list[Clip]]:
    """The training and the validation clips, checked. Characters without a symbol are printed.

    Checks lists, texts and wav headers. It also checks samples if there are problems already, so
    that one report has them all, or if bad clips are skipped; otherwise
    :func:`mel_cache.open_mels` will.

    Raises:
        UserError: all problems, one per line. With ``on_bad_clip=skip`` bad clips are printed and
            left out, unless they are more than 1 % of a set.
    """
    names = hparams.training_files, hparams.validation_files
    sets, unread = [], []
    for filelists in names:
        try:
            sets.append(read_clips(filelists, hparams))
        except UserError as error:  # a setting, or a list that cannot be read
            sets.append(([], []))
            if str(error) not in unread:
                unread.append(str(error))
    (train, train_problems), (val, val_problems) = sets
    if (
        not (unread or train or val)
        and (train_problems or val_problems)
        and all("no such file" in problem.message for problem in train_problems + val_problems)
    ):
        raise UserError(
            f"setting data_dir={hparams.data_dir}: has none of the clips that "
            f"{' and '.join(names)} list; use the folder that their paths start from"
        )
    report_unknown_characters(((clip.location, clip.text) for clip in train + val), hparams)

    train_problems += _in_both(train, val)
    _leave_out(train, train_problems)
    train_problems += _too_long(train, hparams)
    if train_problems or val_problems or hparams.on_bad_clip == "skip":
        for clips, problems in sets:
            _leave_out(clips, problems)
            unchecked = MelCache(hparams).missing(clips) if hparams.cache_mels else clips
            problems += check_samples(unchecked, hparams)
            problems.sort(key=Problem.line)
            _leave_out(clips, problems)
    if unread or hparams.on_bad_clip == "error":
        refuse([*unread, *train_problems, *val_problems])

    for filelists, (clips, problems) in zip(names, sets, strict=True):
        n_lines = len(clips) + len(problems)
        if len(problems) > MAX_SKIPPED * n_lines:
            refuse(
                [
                    *problems,
                    f"{filelists}: {len(problems)} of {n_lines} clips cannot be used, and "
                    f"on_bad_clip=skip leaves out at most {MAX_SKIPPED:.0%}; fix them",
                ]
            )
        for problem in problems:
            print(f"skipped: {problem}")
        if problems:
            print(f"skipped {len(problems)} of the {n_lines:,} clips of {filelists}")
        if not clips:
            raise UserError(f"{filelists}: has no clips; write lines of path|text")
    return train, val


def _leave_out(clips: list[Clip], problems: Sequence[Problem]) -> None:
    """Remove the clips that have a problem."""
    bad = {problem.location for problem in problems}
    clips[:] = [clip for clip in clips if clip.location not in bad]


def _in_both(train: Sequence[Clip], val: Sequence[Clip]) -> list[Problem]:
    """The training clips whose wav file is in the validation set too."""
    locations = {clip.stamp[2:]: clip.location for clip in val}
    message = "{} is in validation too ({}); keep one of the lines"
    return [
        Problem(clip.location, message.format(clip.path, locations[clip.stamp[2:]]))
        for clip in train
        if clip.stamp[2:] in locations
    ]


def _too_long(clips: Sequence[Clip], hparams: HParams) -> list[Problem]:
    """The longest clip, if it exceeds the batch capacity. With ``on_bad_clip=skip``, every clip
    that does, since each is left out."""
    capacity, skip = batch_capacity(hparams) or math.inf, hparams.on_bad_clip == "skip"
    too_long = [clip for clip in clips if clip.n_frames > capacity]
    if not too_long:
        return []
    longest = max(too_long, key=lambda clip: clip.n_frames)
    fix = f"batch_capacity={longest.n_frames}"
    if hparams.batch_capacity_seconds:
        seconds = longest.n_frames * hparams.hop_length / hparams.sampling_rate
        fix = f"batch_capacity_seconds={math.ceil(seconds * 100) / 100}"
    n = len(too_long) - 1
    others = "" if skip or not n else f", and {n:,} more clip{'s are' if n > 1 else ' is'}"
    return [
        Problem(
            clip.location,
            f"{clip.path} has {clip.n_frames} frames, above the batch capacity of {capacity}"
            f"{others}; set {fix} or more, or remove the line{'s' * bool(others)}",
        )
        for clip in (too_long if skip else [longest])
    ]


def data_fingerprint(*sets: Sequence[Clip]) -> str:
    """A hash of the sets' texts and lengths, in order; the location of the files is not in it."""
    content = [[(clip.ids, clip.n_frames) for clip in clips] for clips in sets]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# Batches of indices


def training_sampler(clips: Sequence[Clip], hparams: HParams) -> EpochBatchSampler:
    """The batches of every epoch, by the batching settings.

    Raises:
        UserError: a base batch size larger than the set.
    """
    if hparams.batch_size > len(clips):
        raise UserError(
            f"setting batch_size={hparams.batch_size}: {hparams.training_files} has {len(clips)} "
            f"clips; use at most {len(clips)}"
        )
    names = inspect.signature(EpochBatchSampler).parameters
    settings = {name: getattr(hparams, name) for name in names if hasattr(hparams, name)}
    return EpochBatchSampler(
        [clip.n_frames for clip in clips],
        strategy=hparams.batching_strategy,
        capacity=batch_capacity(hparams),
        **settings,
    )


def validation_batches(clips: Sequence[Clip], hparams: HParams) -> list[list[int]]:
    """RAND with the base batch size (Sec. 6): the same batches for every strategy."""
    plan = plan_batches(
        [clip.n_frames for clip in clips],
        strategy="RAND",
        batch_size=hparams.batch_size,
        dynamic_batch_size=False,
        batch_randomization=False,
        seed=VALIDATION_SEED,
    )
    return [indices.tolist() for indices in plan]


def batch_capacity(hparams: HParams) -> int | None:
    """Frames that a batch may have, padding included; None if neither setting is given."""
    if hparams.batch_capacity_seconds:
        return int(hparams.batch_capacity_seconds * hparams.sampling_rate / hparams.hop_length)
    return hparams.batch_capacity or None


def batching_note(sampler: EpochBatchSampler, hparams: HParams) -> str:
    """Warns that BKT's or ATS's parameter has no effect on these clips, and suggests a value; ""
    if it works."""
    n, batch_size, dynamic = len(sampler.lengths), hparams.batch_size, hparams.dynamic_batch_size
    if len(sampler) == 1:  # whatever the strategy
        return ""
    if hparams.batching_strategy == "BKT" and hparams.bucket_edges == "size":
        name = "bucket_size"
        if hparams.bucket_size < batch_size + dynamic:
            problem = f"no batch has more than {hparams.bucket_size} clips"
            problem += "; dynamic_batch_size makes none larger" * dynamic
        elif hparams.bucket_size >= n:
            problem = f"all {n:,} clips are in one bucket, which is RAND"
        else:
            return ""
    elif hparams.batching_strategy == "ATS" and hparams.n_bins >= len(sampler):
        name = "n_bins"
        problem = f"an epoch has only {len(sampler):,} batches, which makes it RAND, or nearly so"
    else:
        return ""
    try:
        value = like_ssb(sampler.lengths, hparams, hparams.batching_strategy)
        fix = f"{name}={value} pads about as much as"
    except ValueError:
        fix = "with so few clips no value pads as little as"
    strategy = f"{hparams.batching_strategy} with {name}={getattr(hparams, name)}"
    return f"{strategy}: {problem}; {fix} SSB with lrf={hparams.lrf:g}"


def like_ssb(lengths: Sequence[int] | np.ndarray, hparams: HParams, strategy: str) -> int:
    """The largest parameter of BKT or ATS that pads no more than SSB with ``lrf`` (Sec. 3), for
    batches of a fixed size.

    Raises:
        ValueError: there is none.
    """
    fixed = {"batch_size": hparams.batch_size, "seed": hparams.seed, "dynamic_batch_size": False}
    plans = [plan_batches(lengths, "SSB", lrf=hparams.lrf, epoch=e, **fixed) for e in range(8)]
    zpr = sum(batch_statistics(lengths, plan).zpr for plan in plans) / len(plans)
    return int(solve_randomness(lengths, strategy, zpr, **fixed))


# Batches of clips


class Item(NamedTuple):
    """A clip of a dataset, before padding."""

    index: int
    ids: Tensor  # (T_in,) int64
    mel: Tensor  # (T_out, n_mels) float32


class Batch(NamedTuple):
    """Clips, the longest text first, padded with zeros."""

    text: Tensor  # (B, T_in) int64
    text_lengths: Tensor  # (B,) int64, descending
    mel: Tensor  # (B, n_mels, T_out) float32 log-mels
    mel_lengths: Tensor  # (B,) int64
    gate: Tensor  # (B, T_out) float32: 1 from each clip's last frame on
    cpu_text_lengths: Tensor  # (B,) on the CPU, so that packing does not wait for the GPU
    indices: list[int]  # B, of the clips in the dataset

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``. From pinned memory, the copy is not waited for."""
        moved = (tensor.to(device, non_blocking=True) for tensor in self[:5])
        return Batch(*moved, self.cpu_text_lengths, self.indices)


class MelDataset(Dataset):
    """``dataset[i]`` is clip ``i`` as an :class:`Item`."""

    def __init__(self, clips: Sequence[Clip], mels: Mels) -> None:
        self.clips, self.mels = clips, mels

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, i: int) -> Item:
        mel = torch.from_numpy(self.mels(self.clips[i]))
        return Item(i, torch.tensor(self.clips[i].ids), mel)

    def __getitems__(self, indices: list[int]) -> list[Item] | UserError:
        """The clips of a batch, or the first error, which :func:`loaded` raises."""
        try:
            return [self[i] for i in indices]
        except UserError as error:
            return error


def collate(items: Sequence[Item] | UserError) -> Batch | UserError:
    """Items as a batch, padded to the longest text and the longest mel."""
    if isinstance(items, UserError):
        return items
    items = sorted(items, key=lambda item: -len(item.ids))
    B, n_mels = len(items), items[0].mel.size(1)
    text_lengths = torch.tensor([len(item.ids) for item in items])
    mel_lengths = torch.tensor([len(item.mel) for item in items])
    text = torch.zeros(B, int(text_lengths.max()), dtype=torch.int64)
    mel = torch.zeros(B, n_mels, int(mel_lengths.max()))
    for row, item in enumerate(items):
        text[row, : len(item.ids)] = item.ids
        mel[row, :, : len(item.mel)] = item.mel.T
    gate = (~length_mask(mel_lengths - 1, mel.size(2))).float()
    indices = [item.index for item in items]
    return Batch(text, text_lengths, mel, mel_lengths, gate, text_lengths, indices)


# Loaders


@contextmanager
def open_loaders(
    train_set: MelDataset,
    train_batches: Iterable[list[int]],
    val_set: MelDataset,
    val_batches: Iterable[list[int]],
    hparams: HParams,
) -> Iterator[tuple[DataLoader, DataLoader]]:
    """A training and a validation loader. Their processes start here, before CUDA
    does, and end with the context. Left to the garbage collector, they would live as long as
    anything refers to a loader, such as a library that keeps an exception.
    """
    # Pinning memory starts CUDA, so the loader that does it starts last.
    val_loader = make_loader(val_set, _Batches(val_batches), hparams)
    train_loader = make_loader(
        train_set, _Batches(train_batches), hparams, pin_memory=torch.cuda.is_available()
    )
    try:
        for loader in (val_loader, train_loader):
            list(loader)
        yield train_loader, val_loader
    finally:
        for loader in (train_loader, val_loader):
            end_workers(loader._iterator)


class _Batches:
    """``batches``, but none the first time, when a loader only starts its processes."""

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self.batches, self.started = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which runs at the first batch: DataLoader calls iter() twice an epoch.
        if self.started:
            yield from self.batches
        self.started = True


def make_loader(
    dataset: MelDataset,
    batches: Iterable[list[int]],
    hparams: HParams,
    pin_memory: bool = False,
) -> DataLoader:
    """A loader of ``batches`` (lists of indices), whose processes serve all epochs."""
    # train.py has its own note if there are more workers than cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=hparams.num_workers,
        persistent_workers=hparams.num_workers > 0,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own, so that it draws nothing from training's
        worker_init_fn=_ignore_interrupt,
    )


def _ignore_interrupt(worker: int) -> None:
    """Leave Ctrl-C to the training process, which may need one more batch to stop cleanly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def loaded(
    loader: DataLoader, waiting: Callable[[], AbstractContextManager] = nullcontext
) -> Iterator[Batch]:
    """The batches of a loader. The time spent waiting for each is in a ``waiting()`` context.

    Raises:
        UserError: a clip cannot be read, or a loader process was killed.
    """
    batches = None
    while True:
        try:
            if batches is None:
                batches = iter(loader)  # may fail too if a process has died
                # Torch would raise the death of a process mid-step; next() raises it as well.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with waiting():
                batch = next(batches, None)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
                raise
            with waiting():  # a signal may have reached all processes
                raise UserError(
                    "a loader process was killed, perhaps out of memory; --resume with a "
                    "smaller num_workers"
                ) from None
        if batch is None:
            return
        if isinstance(batch, UserError):
            raise batch
        yield batch
