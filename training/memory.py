"""Tries whether the largest batches of a run fit in memory before it begins."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.optim import Optimizer

from batching import EpochBatchSampler
from cli import UserError
from corpus.clips import Clip
from data_utils import Batch, Data, collate
from decoder import graphs
from layers import preserve_buffers
from loss_function import Tacotron2Loss
from model import Tacotron2
from training.device import free_cached_memory, is_out_of_memory, synchronize

FIX = "use a smaller batch_capacity_seconds (with dynamic_batch_size), batch_size or model"


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turns running out of memory into a :class:`UserError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or "of the CPU"
        fix = "free memory on the device, then --resume; or start another run, and"
        raise UserError(f"out of memory ({reason}); {fix} {FIX}") from None


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
        UserError: a batch does not fit.
    """
    n_frames_per_step, device = model.hparams.n_frames_per_step, next(model.parameters()).device
    gpus = [device] if device.type == "cuda" else []
    print("trying the largest batches (check_memory=False goes without)")
    with preserve_buffers(model), torch.random.fork_rng(devices=gpus):
        for indices in largest_batches(data.train_set.clips, data.sampler, epochs):
            batch = collate([data.train_set[i] for i in indices], n_frames_per_step)
            fits = has_room(model, loss_function, optimizer, batch)
            if not fits and graphs.turn_off():
                print("note: memory runs out with CUDA graphs; training goes without, more slowly")
                fits = has_room(model, loss_function, optimizer, batch)
            if not fits:
                B, T_in = batch.text.shape
                size = f"{B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long"
                raise UserError(f"out of memory with a batch of {size}; {FIX}")


def largest_batches(
    clips: Sequence[Clip], sampler: EpochBatchSampler, epochs: Iterable[int]
) -> list[list[int]]:
    """Returns the batches of ``epochs`` that need the most memory: those with the largest padded
    mels, padded texts, and alignments, and with the most clips, without duplicates. Leaves
    ``sampler`` at the last epoch."""
    text_lengths = np.array([len(clip.ids) for clip in clips])
    largest = {}  # by what is large: the size, and the batch's clips
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for batch in sampler.plan:
            B, T_in, T_out = len(batch), text_lengths[batch].max(), sampler.lengths[batch].max()
            sizes = {"clips": B, "texts": B * T_in, "mels": B * T_out, "paths": B * T_in * T_out}
            for name, size in sizes.items():
                if size > largest.get(name, (0, ()))[0]:
                    largest[name] = size, tuple(batch.tolist())
    return [list(indices) for indices in dict.fromkeys(indices for _, indices in largest.values())]


def has_room(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, batch: Batch
) -> bool:
    """Computes gradients on ``batch``; returns whether memory was enough."""
    device = next(model.parameters()).device
    try:
        # Room for Adam's moments, which the first step allocates.
        copies = 0 if optimizer.state else 2
        moments = [torch.empty_like(p) for p in model.parameters() for _ in range(copies)]
        batch = batch.to(device)
        loss_function(model(batch), batch).objective.backward()
        synchronize(device)
        del moments
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        optimizer.zero_grad()
        free_cached_memory(device)  # so that fragments do not affect the next trial
    return True
