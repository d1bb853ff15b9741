"""Whether a run fits in memory: its largest batches are tried before it starts."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import numpy as np
import torch
from torch.optim import Optimizer

from batching import EpochBatchSampler
from cli import UserError
from corpus.clips import Clip
from data_utils import Batch, Item, MelDataset, batch_capacity, collate
from decoder import fall_back_to_scan
from decoder.scan import STEPS
from hparams import HParams
from layers import preserved_buffers
from loss_function import Tacotron2Loss
from model import Tacotron2
from training.checkpoint import random_state, set_random_state
from training.device import is_out_of_memory, synchronize


def too_large(batch: Batch) -> str:
    B, T_in = batch.text.shape
    return (
        f"a batch of {B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long, needs "
        "more memory than there is"
    )


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turns running out of memory into a :class:`UserError` that says ``problem`` and the fix."""
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
    """Returns the batches of ``epochs`` that need the most memory: those with the largest padded
    mels, padded texts, and alignments, and the most clips, without duplicates; and (B, T_in) of all
    batches. Leaves ``sampler`` at the last epoch.
    """
    texts = np.array([len(clip.ids) for clip in clips])
    # Of mels, texts, alignments and recurrent states: size, and indices of clips.
    largest, shapes = [(0, ())] * 4, set()
    for epoch in epochs:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        B = np.array([len(batch) for batch in plan])
        T_in, T_out = (
            np.array([n[batch].max() for batch in plan]) for n in (texts, sampler.lengths)
        )
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
    """Runs forward and backward passes of each batch, then of a few frames of each of ``shapes``
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
            print(f"note: {fall_back_to_scan(model.decoder, error)}")
            return fits(model, loss_function, optimizer, items)

    states = random_state()
    with preserved_buffers(model), ExitStack() as afterwards:
        afterwards.callback(set_random_state, states)
        for items in trials:
            sizes = [*range(len(items), 1, -max(len(items) // 8, 1)), 1]
            n_fitting = next((n for n in sizes if fits_somehow(items[:n])), 0)
            if n_fitting < len(items):
                fix = _suggestion(n_fitting / len(items), dataset, hparams)
                raise UserError(f"{too_large(collate(items))}; {fix}")
            check_stop()


def fits(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, items: list[Item]
) -> bool:
    """Returns whether a training step on a batch of ``items`` fits in memory."""
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
    """Returns a clip of this size."""
    return Item(0, torch.zeros(T_in, dtype=torch.int64), torch.zeros(T_out, n_mels))


def _suggestion(fraction: float, dataset: MelDataset, hparams: HParams) -> str:
    """Says what to set if ``fraction`` of a batch fits in memory."""
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
