"""Whether a run fits in memory: its largest batches are tried before it starts, and
scripts/find_batch_capacity.py searches for the largest batch capacity that fits."""

import dataclasses
import multiprocessing
import resource
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from batching import EpochBatchSampler
from checkpoint import random_state, set_random_state
from cli import StopSignals, UserError
from clips import Clip
from data_utils import Batch, Item, MelDataset, batch_capacity, collate, training_sampler
from device import choose_device, is_out_of_memory, peak_memory, synchronize
from hparams import HParams
from loss_function import Tacotron2Loss
from model import Tacotron2


def largest_batches(
    clips: Sequence[Clip], sampler: EpochBatchSampler, epochs: Iterable[int]
) -> list[list[int]]:
    """The batches of ``epochs`` that need the most memory: those with the largest padded mels,
    padded texts, and alignments, without duplicates. Leaves ``sampler`` at the last epoch.
    """
    texts = np.array([len(clip.ids) for clip in clips])
    largest = [(0, ())] * 3  # of mels, texts and alignments: size, and indices of clips
    for epoch in epochs:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        starts = plan.ends - plan.sizes
        T_in, T_out = (
            np.maximum.reduceat(np.asarray(lengths, np.int64)[plan.order], starts)
            for lengths in (texts, sampler.lengths)
        )
        sizes = plan.sizes * T_out, plan.sizes * T_in, plan.sizes * T_in * T_out
        for kind, batch_sizes in enumerate(sizes):
            j = int(batch_sizes.argmax())
            if batch_sizes[j] > largest[kind][0]:
                largest[kind] = int(batch_sizes[j]), tuple(plan[j].tolist())
    return [list(indices) for indices in dict.fromkeys(indices for _, indices in largest)]


def try_batches(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: torch.optim.Optimizer,
    dataset: MelDataset,
    batches: list[list[int]],
    hparams: HParams,
    stop: StopSignals,
) -> None:
    """Run forward and backward passes of each batch, and leave the model as it was.

    Raises:
        UserError: a batch does not fit; the message suggests a setting that does.
    """
    states, buffers = random_state(), [buffer.clone() for buffer in model.buffers()]
    model.train()
    try:
        for indices in batches:
            items = [dataset[i] for i in indices]
            if fits(model, loss_function, optimizer, items):
                stop.check()
                continue
            B, step = len(items), max(len(items) // 8, 1)
            smaller = range(B * 7 // 8, 0, -step)
            trials = (n for n in smaller if fits(model, loss_function, optimizer, items[:n]))
            fix = _suggestion(next(trials, 0) / B, dataset, hparams)
            raise UserError(f"{too_large(collate(items))}; {fix}")
    finally:
        set_random_state(states)
        for buffer, old in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(old)


def fits(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: torch.optim.Optimizer,
    items: Sequence[Item],
) -> bool:
    """Whether a training step on a batch of ``items`` fits in memory."""
    device = next(model.parameters()).device
    try:
        # Room for Adam's moments, which the first step allocates.
        copies = 0 if optimizer.state else 2
        moments = [torch.empty_like(p) for p in model.parameters() for _ in range(copies)]
        batch = collate(items).to(device)
        loss_function(model(batch), batch).objective.backward()
        synchronize(device)
        del moments
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # so that fragments do not affect the next trial
    return True


def _suggestion(fraction: float, dataset: MelDataset, hparams: HParams) -> str:
    """What to set if ``fraction`` of a batch fits in memory."""
    longest = max(clip.n_frames for clip in dataset.clips)
    capacity = batch_capacity(hparams) or hparams.batch_size * longest
    seconds = capacity * hparams.hop_length / hparams.sampling_rate
    if fraction * capacity < longest or fraction * hparams.batch_size < 1:
        return "not even one clip fits: remove the longest, or reduce the model"
    fix = f"batch_size={int(fraction * hparams.batch_size)} (now {hparams.batch_size})"
    if hparams.dynamic_batch_size:
        fix = f"batch_capacity_seconds={fraction * seconds:.0f} (now {seconds:.0f})"
    return f"set {fix}; scripts/find_batch_capacity.py finds the largest that fits"


def too_large(batch: Batch) -> str:
    B, T_in = batch.text.shape
    return (
        f"a batch of {B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long, needs "
        "more memory than there is"
    )


@contextmanager
def explained(batch: Batch, name: str) -> Iterator[None]:
    """Turn running out of memory into a :class:`UserError` with the size of the batch ``name``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{name}: {too_large(batch)}; free memory on the device, then --resume; or start "
            "another run with a smaller batch_capacity_seconds or batch_size"
        ) from None


# The search for the largest capacity


def find_capacity(
    clips: Sequence[Clip], hparams: HParams, memory_gib: float | None, tolerance: float
) -> int | None:
    """The largest batch capacity, in frames, with which all batches of a run fit in memory; None
    if all clips fit in one batch. Prints each trial, and runs it in its own process.

    Args:
        memory_gib: memory to use; None for all of a GPU's, or all that is free now on a CPU.
        tolerance: largest relative error of the result.

    Raises:
        UserError: not even the longest clip fits.
    """
    lengths = [clip.n_frames for clip in clips]
    longest, total = max(lengths), sum(lengths)
    fitting, too_much, capacity = 0, 2 * total, longest
    while too_much - fitting > tolerance * max(fitting, longest):
        if _capacity_fits(capacity, clips, hparams, memory_gib):
            fitting = capacity
        else:
            too_much = capacity
        if too_much == longest:
            raise UserError(
                f"not even the longest clip, of {longest} frames, fits the memory; remove it, or "
                "reduce the model"
            )
        if fitting >= total:
            return None
        # Double the capacity while it fits, then bisect.
        capacity = 2 * fitting if too_much > 2 * fitting else (fitting + too_much) // 2
    return fitting


def _capacity_fits(
    capacity: int, clips: Sequence[Clip], hparams: HParams, memory_gib: float | None
) -> bool:
    hparams = dataclasses.replace(hparams, batch_capacity=capacity, batch_capacity_seconds=0.0)
    sampler = training_sampler(clips, hparams)
    batches = largest_batches(clips, sampler, range(hparams.epochs))
    shapes = [[(len(clips[i].ids), clips[i].n_frames) for i in batch] for batch in batches]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            peak = pool.submit(_measure, hparams, shapes, memory_gib).result()
        except BrokenProcessPool:  # killed, as Linux does when memory runs out
            peak = None
    seconds = capacity * hparams.hop_length / hparams.sampling_rate
    print(
        f"{seconds:8.1f} s, largest batches of up to {max(map(len, batches)):>4} clips: "
        + ("too much" if peak is None else f"{peak:.2f} GiB"),
        flush=True,
    )
    return peak is not None


def _measure(
    hparams: HParams, shapes: list[list[tuple[int, int]]], memory_gib: float | None
) -> float | None:
    """Peak memory in GiB of steps on batches of clips of (T_in, T_out); None if it runs out."""
    torch.optim.Adam([torch.zeros(1)])  # imports its modules before memory is limited
    device = choose_device(hparams)
    if device.type == "cuda":
        if memory_gib:
            total = torch.cuda.get_device_properties(device).total_memory / 2**30
            torch.cuda.set_per_process_memory_fraction(min(memory_gib / total, 1.0))
        torch.cuda.reset_peak_memory_stats()
    else:
        limit = int((memory_gib or free_memory()) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        model = Tacotron2(hparams).to(device).train()
    except (RuntimeError, MemoryError):  # not even the weights fit
        return None
    loss_function = Tacotron2Loss(hparams.guided_attention_weight, hparams.guided_attention_sigma)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in shapes:
        items = [
            Item(0, torch.ones(T_in, dtype=torch.long), torch.zeros(T_out, hparams.n_mel_channels))
            for T_in, T_out in batch
        ]
        if not fits(model, loss_function, optimizer, items):
            return None
    return peak_memory(device)


def free_memory() -> float:
    """Memory in GiB that a new process could use on this computer."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) / 2**20
