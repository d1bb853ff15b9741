"""Whether a run fits in memory: its largest batches are tried before it starts, and
scripts/find_batch_capacity.py searches for the largest batch capacity that fits."""

import dataclasses
import math
import multiprocessing
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.optim import Adam, Optimizer

from batching import EpochBatchSampler
from cli import UserError
from corpus.clips import Clip
from data_utils import Batch, Item, MelDataset, batch_capacity, collate, training_sampler
from decoder.scan import STEPS
from hparams import HParams
from layers import kept_buffers
from loss_function import Tacotron2Loss
from model import Tacotron2
from training.checkpoint import random_state, set_random_state
from training.device import choose_device, is_out_of_memory, peak_memory, synchronize


def too_large(batch: Batch) -> str:
    B, T_in = batch.text.shape
    return (
        f"a batch of {B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long, needs "
        "more memory than there is"
    )


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn running out of memory into a :class:`UserError` that says ``problem`` and the fix."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{problem}; free memory on the device, then --resume; or start another run with a "
            "smaller batch_capacity_seconds, batch_size or model"
        ) from None


def largest_batches(
    clips: Sequence[Clip], sampler: EpochBatchSampler, epochs: Iterable[int]
) -> tuple[list[list[int]], set[tuple[int, int]]]:
    """The batches of ``epochs`` that need the most memory: those with the largest padded mels,
    padded texts, and alignments, and the most clips, without duplicates; and (B, T_in) of all
    batches. Leaves ``sampler`` at the last epoch.
    """
    texts = np.array([len(clip.ids) for clip in clips])
    # Of mels, texts, alignments and recurrent states: size, and indices of clips.
    largest, shapes = [(0, ())] * 4, set()
    for epoch in epochs:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        B, starts = plan.sizes, plan.ends - plan.sizes
        T_in, T_out = (np.maximum.reduceat(n[plan.order], starts) for n in (texts, sampler.lengths))
        for kind, sizes in enumerate((B * T_out, B * T_in, B * T_in * T_out, B)):
            j = int(sizes.argmax())
            largest[kind] = max(largest[kind], (int(sizes[j]), tuple(plan[j].tolist())))
        shapes |= set(zip(B.tolist(), T_in.tolist(), strict=True))
    return [list(indices) for indices in dict.fromkeys(indices for _, indices in largest)], shapes


def try_batches(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: Optimizer,
    dataset: MelDataset,
    batches: Sequence[Sequence[int]],
    shapes: Iterable[tuple[int, int]],
    hparams: HParams,
    check_stop: Callable[[], None],
) -> None:
    """Run forward and backward passes of each batch, then of a few frames of each of ``shapes``
    (B, T_in) that has CUDA graphs of its own. Leaves the model as it was; but if decoder.triton
    fails, the model uses scan from then on.

    Raises:
        UserError: a batch does not fit; the message suggests a setting that does.
    """
    trials = chain(
        ([dataset[i] for i in indices] for indices in batches),
        (
            [blank(T_in, STEPS, hparams.n_mel_channels)] * B
            for B, T_in in model.decoder.graph_shapes(shapes)
        ),
    )

    def fits_somehow(items: list[Item]) -> bool:
        try:
            return fits(model, loss_function, optimizer, items)
        except Exception as error:  # a kernel that does not compile for this size, say
            if model.decoder.implementation != "triton":
                raise
            print(f"note: {model.decoder.give_up_triton(error)}")
            return fits(model, loss_function, optimizer, items)

    states = random_state()
    with kept_buffers(model), ExitStack() as afterwards:
        afterwards.callback(set_random_state, states)
        for items in trials:
            sizes = [*range(len(items), 1, -max(len(items) // 8, 1)), 1]
            most = next((n for n in sizes if fits_somehow(items[:n])), 0)
            if most < len(items):
                fix = _suggestion(most / len(items), dataset, hparams)
                raise UserError(f"{too_large(collate(items))}; {fix}")
            check_stop()


def fits(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, items: list[Item]
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


def blank(T_in: int, T_out: int, n_mels: int) -> Item:
    """A clip of this size."""
    return Item(0, torch.zeros(T_in, dtype=torch.int64), torch.zeros(T_out, n_mels))


def _suggestion(fraction: float, dataset: MelDataset, hparams: HParams) -> str:
    """What to set if ``fraction`` of a batch fits in memory."""
    longest = max(clip.n_frames for clip in dataset.clips)
    capacity = batch_capacity(hparams) or hparams.batch_size * longest
    hop_seconds = hparams.hop_length / hparams.sampling_rate
    if fraction * capacity < longest or fraction * hparams.batch_size < 1:
        return "not even one clip fits: remove the longest, or reduce the model"
    fix = f"batch_size={int(fraction * hparams.batch_size)} (now {hparams.batch_size})"
    if hparams.dynamic_batch_size:
        seconds = capacity * hop_seconds
        fits = max(int(fraction * seconds), math.ceil(longest * hop_seconds))
        fix = f"batch_capacity_seconds={fits} (now {seconds:.0f})"
    return f"set {fix}; scripts/find_batch_capacity.py finds the largest that fits"


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
    longest, one_batch = max(lengths), max(lengths) * len(lengths)
    fitting, too_much, capacity = 0, 2 * one_batch, longest
    while fitting < one_batch and too_much - fitting > tolerance * fitting:
        if _capacity_fits(capacity, clips, hparams, memory_gib):
            fitting = capacity
        else:
            too_much = capacity
        if not fitting:
            raise UserError(
                f"not even the longest clip, of {longest} frames, fits the memory; remove it, or "
                "reduce the model"
            )
        # Double the capacity while it fits, then bisect.
        capacity = min(2 * fitting, (fitting + too_much) // 2)
    return fitting if fitting < one_batch else None


def _capacity_fits(
    capacity: int, clips: Sequence[Clip], hparams: HParams, memory_gib: float | None
) -> bool:
    hparams = dataclasses.replace(hparams, batch_capacity=capacity, batch_capacity_seconds=0.0)
    sampler = training_sampler(clips, hparams)
    largest, _ = largest_batches(clips, sampler, range(hparams.epochs))
    batches = [[clips[i] for i in indices] for indices in largest]
    peak = None
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        suppress(BrokenProcessPool),  # killed, as Linux does when memory runs out
    ):
        peak = pool.submit(_measure, hparams, batches, memory_gib).result()
    seconds = capacity * hparams.hop_length / hparams.sampling_rate
    n_clips, result = max(map(len, batches)), "too much" if peak is None else f"{peak:.2f} GiB"
    print(f"{seconds:8.1f} s, largest batches of up to {n_clips:>4} clips: {result}")
    return peak is not None


def _measure(hparams: HParams, batches: list[list[Clip]], memory_gib: float | None) -> float | None:
    """Peak memory in GiB of training steps on batches as long as these; None if it runs out."""
    Adam([torch.zeros(1)])  # imports its modules before memory is limited
    device = choose_device(hparams)
    if device.type == "cpu":
        limit = int((memory_gib or free_memory()) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    elif memory_gib:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(memory_gib / total, 1.0))
    try:
        model = Tacotron2(hparams).to(device)
    except (RuntimeError, MemoryError):  # not even the weights fit
        return None
    loss_function = Tacotron2Loss(
        hparams.guided_attention_weight, hparams.guided_attention_sigma, hparams.loss
    )
    optimizer, n_mels = Adam(model.parameters()), hparams.n_mel_channels
    for clips in batches:
        items = [blank(len(clip.ids), clip.n_frames, n_mels) for clip in clips]
        if not fits(model, loss_function, optimizer, items):
            return None
    return peak_memory(device)


def free_memory() -> float:
    """Memory in GiB that a new process could use on this computer."""
    meminfo = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable: *(\d+) kB", meminfo)[1]) / 2**20
