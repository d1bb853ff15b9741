"""From clips to batches: the dataset, the training sampler, and the validation batches.

filelists --corpus.sets.load_data--> clips --open_mels--> mels --MelDataset, load_ahead--> Batch
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from batching import STRATEGIES, EpochBatchSampler, plan_batches
from cli import UserError
from corpus.clips import Clip, padded_frames, read_speak_texts
from corpus.mels import Mels, open_mels
from corpus.sets import batch_capacity
from hparams import HParams
from layers import length_mask

VALIDATION_SEED = 1234  # the same validation batches for every strategy

Fingerprint = list[list[tuple[int, int]]]  # see data_fingerprint()


class Data(NamedTuple):
    """All that a run trains on."""

    train_set: "MelDataset"
    val_set: "MelDataset"
    sampler: EpochBatchSampler  # of the training batches
    val_batches: list[list[int]]
    texts: list[list[int]]  # symbol ids of speak_texts
    fingerprint: Fingerprint


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
    texts = read_speak_texts(hparams)
    sampler = training_sampler(train_clips, hparams, rank, world_size)
    mels = open_mels([*train_clips, *val_clips], hparams)
    return Data(
        MelDataset(train_clips, mels, hparams.n_frames_per_step),
        MelDataset(val_clips, mels, hparams.n_frames_per_step),
        sampler,
        validation_batches(val_clips, hparams),
        texts,
        data_fingerprint(train_clips, val_clips),
    )


def data_fingerprint(*sets: Sequence[Clip]) -> Fingerprint:
    """Returns the frames of each clip and a checksum of its text, in order, but not where its
    file is."""
    return [[(c.n_frames, zlib.crc32(repr(c.ids).encode())) for c in clips] for clips in sets]


def refuse_other_data(saved: Fingerprint, sets: Sequence[Sequence[Clip]], path: Path) -> None:
    """Raises :class:`UserError` unless the clips of ``sets`` are those that the checkpoint ``path``
    was trained on, whose fingerprint is ``saved``."""
    current = data_fingerprint(*sets)
    if saved == current:
        return
    difference, fix = "than the filelists now list", "the filelists"
    if list(map(len, saved)) == list(map(len, current)):
        difference, fix = f"than now: {_changed_clips(saved, current, sets)}", "what it was"
    raise UserError(
        f"{path}: was trained on clips of other texts, lengths or order {difference}; restore "
        f"{fix}, or start another run by -c with another -o"
    )


def _changed_clips(saved: Fingerprint, current: Fingerprint, sets: Sequence[Sequence[Clip]]) -> str:
    """Says what has changed about the first clip that differs, and how many more do."""
    rows = zip(chain(*sets), chain(*saved), chain(*current), strict=True)
    changed = [row for row in rows if row[1] != row[2]]
    clip, (frames_then, _), (frames_now, _) = changed[0]
    change = "another text"
    if frames_now != frames_then:
        change = f"{frames_now} frames, and had {frames_then}"
    more = f" (and {len(changed) - 1:,} more differ)" if len(changed) > 1 else ""
    return f"{clip.location}: {clip.path} has {change}{more}"


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
