"""Tries whether the largest batches of a run fit in memory, and says what to do if it runs out."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from batching import EpochBatchSampler
from cli import UserError
from corpus.clips import Clip, padded_frames
from corpus.sets import batch_capacity
from data_utils import Batch, Data, Item, MelDataset, collate
from decoder import graphs
from hparams import HParams
from layers import preserve_buffers, restore_buffers
from loss_function import Tacotron2Loss
from model import Tacotron2
from training import distributed
from training.device import (
    free_cached_memory,
    is_out_of_memory,
    may_be_out_of_memory,
    synchronize,
)
from training.start import random_state, set_random_state

WITHOUT_GRAPHS = "note: memory ran out: training goes on without CUDA graphs, more slowly"
Result = TypeVar("Result")


# When memory runs out


def too_large(batch: Batch) -> str:
    """Says that a batch needs more memory than there is."""
    B, T_in = batch.text.shape
    return (
        f"a batch of {B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long, needs "
        "more memory than there is"
    )


@contextmanager
def explained(problem: str, others_passed: bool = False) -> Iterator[None]:
    """Turns running out of memory into a :class:`UserError` that says ``problem`` and the fix.

    Args:
        others_passed: whether other batches fitted. Then an error that may have another cause
            counts too, and is quoted.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (may_be_out_of_memory(error) if others_passed else is_out_of_memory(error)):
            raise
        if not is_out_of_memory(error):
            problem += f", most likely ({error})".replace("\n", " ")
        elif isinstance(error, MemoryError) and str(error):
            problem += f" ({error})"
        raise UserError(
            f"{problem}; free memory on the device, then --resume; or start another run with a "
            "smaller batch_capacity_seconds, batch_size or model"
        ) from None


def without_graphs_if_full(
    function: Callable[[], Result], model: Tacotron2, buffers: Sequence[Tensor] | None = None
) -> Result:
    """Calls ``function``. If memory runs out while CUDA graphs hold some of it, this frees them,
    prints a line, sets the model's buffers to ``buffers``, if given, and calls it again.

    One of several processes does not try again, since the others are waiting for it in the middle
    of the first call.
    """
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if distributed.SEVERAL or not may_be_out_of_memory(error) or not graphs.turn_off():
            raise
    # Only now, since the error held tensors.
    free_cached_memory(next(model.parameters()).device)
    if buffers is not None:
        restore_buffers(model, buffers)
    tqdm.write(WITHOUT_GRAPHS)
    return function()


# Before a run


def largest_batches(
    clips: Sequence[Clip], sampler: EpochBatchSampler, epochs: Iterable[int]
) -> list[list[int]]:
    """Returns the batches of ``epochs`` that need the most memory: those with the largest padded
    mels, padded texts, and alignments, and with the most clips, without duplicates. Leaves
    ``sampler`` at the last epoch."""
    text_lengths = np.array([len(clip.ids) for clip in clips])
    largest = [(0, ())] * 4  # the size of each of these four, and the batch's clips
    for epoch in epochs:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        B = np.array([len(batch) for batch in plan])
        T_in = np.array([text_lengths[batch].max() for batch in plan])
        T_out = np.array([sampler.lengths[batch].max() for batch in plan])
        for kind, sizes in enumerate((B * T_out, B * T_in, B * T_in * T_out, B)):
            j = int(sizes.argmax())
            largest[kind] = max(largest[kind], (int(sizes[j]), tuple(plan[j].tolist())))
    return [list(indices) for indices in dict.fromkeys(indices for _, indices in largest)]


@contextmanager
def unchanged(model: Tacotron2) -> Iterator[None]:
    """Restores the model's buffers and all random states when the context ends."""
    states = random_state()
    with preserve_buffers(model):
        try:
            yield
        finally:
            set_random_state(states)


def try_run(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: Optimizer,
    data: Data,
    epochs: Iterable[int],
) -> None:
    """Computes gradients on the largest batches of ``epochs``, and leaves the model as it was. If a
    batch fits only without CUDA graphs, training goes on without them.

    Raises:
        UserError: a batch does not fit; the message suggests a setting that does.
    """
    dataset, hparams = data.train_set, model.hparams
    with unchanged(model):
        for indices in largest_batches(dataset.clips, data.sampler, epochs):
            items = [dataset[i] for i in indices]
            n_fitting = largest_fitting(model, loss_function, optimizer, items)
            if n_fitting < len(items):
                fix = _suggestion(n_fitting / len(items), dataset, hparams)
                batch = collate(items, hparams.n_frames_per_step)
                raise UserError(f"{too_large(batch)}; {fix}")


def largest_fitting(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, items: list[Item]
) -> int:
    """Returns how many of the first ``items`` fit in a batch. Tries all, then an eighth fewer each
    time, then one; returns 0 if not even one fits. Then an error that may have another cause than
    memory is raised.
    """
    for n in [*range(len(items), 1, -max(len(items) // 8, 1)), 1]:
        error = memory_error(model, loss_function, optimizer, items[:n])
        if error and graphs.turn_off():
            error = memory_error(model, loss_function, optimizer, items[:n])
            if not error:
                tqdm.write(WITHOUT_GRAPHS)
        if not error:
            return n
    if is_out_of_memory(error):
        return 0
    raise error


def memory_error(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, items: list[Item]
) -> Exception | None:
    """Computes gradients on a batch of ``items``. Returns the error that says, or may say, that it
    does not fit in memory; None if it fits."""
    device = next(model.parameters()).device
    try:
        # Room for Adam's moments, which the first step allocates.
        copies = 0 if optimizer.state else 2
        moments = [torch.empty_like(p) for p in model.parameters() for _ in range(copies)]
        batch = collate(items, model.hparams.n_frames_per_step).to(device)
        loss_function(model(batch), batch).objective.backward()
        synchronize(device)
        del moments
    except (RuntimeError, MemoryError) as error:
        if not may_be_out_of_memory(error):
            raise
        return error.with_traceback(None)  # which holds tensors
    finally:
        optimizer.zero_grad()
        free_cached_memory(device)  # so that fragments do not affect the next trial
    return None


def _suggestion(fraction: float, dataset: MelDataset, hparams: HParams) -> str:
    """Suggests a setting with which batches fit, if ``fraction`` of the largest one does."""
    longest = max(padded_frames(clip, hparams) for clip in dataset.clips)
    capacity = batch_capacity(hparams) or hparams.batch_size * longest
    hop_seconds = hparams.hop_length / hparams.sampling_rate
    if fraction * capacity < longest or fraction * hparams.batch_size < 1:
        return "not even one clip fits: remove the longest, or reduce the model"
    if not hparams.dynamic_batch_size:
        return f"set batch_size={int(fraction * hparams.batch_size)} (now {hparams.batch_size})"
    fitting = int(fraction * capacity)
    if hparams.batch_capacity:
        return f"set batch_capacity={fitting} (now {capacity})"
    seconds = math.ceil(100 * fitting * hop_seconds) / 100
    return f"set batch_capacity_seconds={seconds:g} (now {capacity * hop_seconds:.0f})"
