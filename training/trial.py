"""What is tried before a run starts: which decoder is the fastest here, and whether the largest
batches fit in memory."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from batching import EpochBatchSampler
from cli import UserError, progress_bar
from corpus.clips import Clip
from data_utils import (
    Batch,
    Data,
    Item,
    MelDataset,
    batch_capacity,
    collate,
    padded_frames,
)
from decoder import check_fast_path, fall_back_to_scan, scan, triton_fails, use_scan
from hparams import HParams
from layers import preserved_buffers
from loss_function import Tacotron2Loss
from model import Decoder, Tacotron2
from training import distributed
from training.checkpoint import random_state, set_random_state
from training.device import (
    free_cached_memory,
    full_precision,
    is_out_of_memory,
    may_be_out_of_memory,
    synchronize,
)
from training.stop import Stopped

# How far triton's loss and gradient may be from scan's, as shares of their size: what rounding in
# the precision explains.
TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2}
N_STEPS = 4  # with each decoder on a batch; the first compiles kernels, and is not timed
Result = TypeVar("Result")


def too_large(batch: Batch) -> str:
    B, T_in = batch.text.shape
    return (
        f"a batch of {B} clips, up to {batch.mel.size(2)} frames and {T_in} symbols long, needs "
        "more memory than there is"
    )


@contextmanager
def explained(problem: str, others_passed: bool = False) -> Iterator[None]:
    """Turns running out of memory into a :class:`UserError` that says ``problem`` and the fix. If
    other batches have passed, an error that may have another cause counts too, and is quoted."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (may_be_out_of_memory(error) if others_passed else is_out_of_memory(error)):
            raise
        if not is_out_of_memory(error):
            problem += f", most likely ({error})".replace("\n", " ")
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
    found, shapes = [(0, ())] * 4, set()
    for epoch in epochs:
        sampler.set_epoch(epoch)
        plan = sampler.plan
        B = np.array([len(batch) for batch in plan])
        T_in, T_out = (
            np.array([n[batch].max() for batch in plan]) for n in (texts, sampler.lengths)
        )
        for kind, sizes in enumerate((B * T_out, B * T_in, B * T_in * T_out, B)):
            j = int(sizes.argmax())
            found[kind] = max(found[kind], (int(sizes[j]), tuple(plan[j].tolist())))
        shapes |= set(zip(B.tolist(), T_in.tolist(), strict=True))
    return [list(indices) for indices in dict.fromkeys(indices for _, indices in found)], shapes


@contextmanager
def unchanged(model: Tacotron2) -> Iterator[None]:
    """Restores the model's buffers and all random states at the end."""
    states = random_state()
    with preserved_buffers(model):
        try:
            yield
        finally:
            set_random_state(states)


def with_fallback(
    model: Tacotron2, function: Callable[..., Result], *arguments: object, together: bool = False
) -> Result:
    """Calls ``function``. If it fails while the model uses decoder=triton, for another reason than
    memory, the model uses scan from then on, a line says so, and ``function`` is called again, with
    the model's buffers as they were.

    Args:
        together: all processes call ``function``, and wait for each other in it.

    Raises:
        UserError: it failed in one of several processes ``together``, where the others are in the
            middle of it.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with distributed.explained():
            return function(*arguments)
    except (Stopped, UserError):
        raise
    except Exception as error:  # a kernel that does not compile for this size, say
        if model.decoder.implementation != "triton" or may_be_out_of_memory(error):
            raise
        if together and distributed.SEVERAL:
            fix = "--resume with --hparams decoder=scan"
            raise UserError(f"{triton_fails(error)}; {fix}") from error
        tqdm.write(f"note: {fall_back_to_scan(model.decoder, error)}")
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    return function(*arguments)


# Which decoder


def check_decoder(model: Tacotron2, batch: Batch, resumed: str = "") -> bool:
    """Checks the fast decoder on a few frames, and prints what :func:`check_fast_path` notes. With
    decoder=auto, a run that is ``resumed`` keeps the one that was chosen for it, if this device can
    use it. Returns whether it is still to be chosen."""
    decoder, device = model.decoder, batch.mel.device
    usable = ("scan", "triton") if device.type == "cuda" else ("scan",)
    if decoder.implementation == "auto" and resumed in usable:
        decoder.implementation = resumed
    is_open = decoder.implementation == "auto"
    if device.type == "cuda" and decoder.implementation in ("auto", "triton"):
        print("checking the decoder; kernels compile, for about a minute the first time")
    with full_precision(), explained("checking the decoder: out of memory", others_passed=True):
        for note in check_fast_path(model, batch):
            print(f"note: {note}")
    return is_open


def connect_replicas(model: Tacotron2, batch: Batch, loss_function: Tacotron2Loss) -> nn.Module:
    """Returns the model, whose backward pass averages the gradients of all processes, after a first
    pass on a batch of a few frames."""
    decoder, chosen = model.decoder, model.decoder.implementation
    if chosen == "triton":  # which has not been tried in this precision yet
        decoder.implementation = "scan"
    with full_precision():
        replica = distributed.replicated(model, lambda m: loss_function(m(batch), batch).objective)
    decoder.implementation = chosen
    return replica


class Steps(NamedTuple):
    """Training steps on one batch, all alike."""

    loss: Tensor  # ()
    gradient: Tensor  # (n_parameters,)
    seconds: float  # median


def choose_decoder(
    model: Tacotron2, loss_function: Tacotron2Loss, dataset: MelDataset, plan: Sequence[np.ndarray]
) -> None:
    """Makes a model that uses decoder=triton go on with it if its loss and gradient are those of
    scan, and it is faster, on the largest batch of ``plan`` and on one of middle size; else with
    scan. All processes do the same. Prints which, and why. Leaves all else as it was."""
    decoder, lengths = model.decoder, np.array([clip.n_frames for clip in dataset.clips])
    by_size = sorted(plan, key=lambda batch: len(batch) * lengths[batch].max())
    chosen = dict.fromkeys((len(plan) - 1, len(plan) // 2))  # the largest first: buffers grow once
    batches = [[dataset[i] for i in by_size[j]] for j in chosen]
    note = ""
    if not distributed.largest(decoder.implementation != "triton"):  # every process can use it
        note = faster_decoder(model, loss_function, batches)
    if note:
        print(f"note: {note}")
    agree_on_decoder(decoder)


def agree_on_decoder(decoder: Decoder) -> None:
    """Makes all processes use scan if one of them does. All call this together."""
    any_uses_scan = distributed.largest(decoder.implementation != "triton")
    if any_uses_scan and decoder.implementation == "triton":
        use_scan(decoder)
        print("note: decoder=scan, as other processes choose")


def faster_decoder(
    model: Tacotron2, loss_function: Tacotron2Loss, batches: Sequence[list[Item]]
) -> str:
    """Makes the model use the better of scan and triton; returns a line that says which."""
    decoder, device = model.decoder, next(model.parameters()).device
    seconds = {"scan": 0.0, "triton": 0.0}
    with unchanged(model):
        for items in progress_bar(batches, "choosing the decoder; kernels compile"):
            batch = collate(items, model.hparams.n_frames_per_step).to(device)
            steps = {}
            for name in seconds:
                decoder.implementation = name
                try:
                    steps[name] = take_steps(model, loss_function, batch)
                except Exception as error:
                    if name == "triton":
                        return fall_back_to_scan(decoder, error)
                    if not may_be_out_of_memory(error):
                        raise
                    break  # try_run will say what to set
                finally:
                    model.zero_grad()
                    free_cached_memory(device)
            if len(steps) < 2:
                continue
            for name in ("loss", "gradient"):
                scan, triton = (getattr(s, name) for s in steps.values())
                difference = ((triton - scan).norm() / scan.norm()).item()
                if not difference <= TOLERANCES[model.hparams.precision]:
                    problem = f"its {name} differs from scan's by {difference:.1g} of its size"
                    return fall_back_to_scan(decoder, problem)
            for name, taken in steps.items():
                seconds[name] += taken.seconds
    decoder.implementation = min(seconds, key=seconds.__getitem__)
    if decoder.implementation == "scan":
        use_scan(decoder)
    if not any(seconds.values()):
        return "decoder=scan: batches do not fit in memory, so nothing was compared"
    times = " and ".join(f"{taken:.3f} s with {name}" for name, taken in seconds.items())
    return f"decoder={decoder.implementation} is the fastest: steps take {times}"


def take_steps(model: Tacotron2, loss_function: Tacotron2Loss, batch: Batch) -> Steps:
    """Takes N_STEPS training steps on ``batch``, with the same dropout, but no optimizer steps; and
    a validation step."""
    seconds = []
    for _ in range(N_STEPS):
        model.zero_grad()
        torch.manual_seed(0)
        start = time.perf_counter()
        loss = loss_function(model(batch), batch).objective
        loss.backward()
        synchronize(batch.mel.device)
        seconds.append(time.perf_counter() - start)
    model.eval()
    try:
        with torch.no_grad(), full_precision():
            model(batch)
    finally:
        model.train()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return Steps(loss.detach(), torch.cat(gradients), statistics.median(seconds[1:]))


# Whether it fits


def try_run(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: Optimizer,
    data: Data,
    epochs: Iterable[int],
    check_stop: Callable[[], None],
) -> None:
    """Tries the shapes of all batches of ``epochs`` and of validation, and the largest. Leaves the
    model as it was; but if decoder=triton fails, the model uses scan from then on.

    Args:
        check_stop: is called after each batch, by all processes together; may raise.

    Raises:
        UserError: a batch does not fit; the message suggests a setting that does.
    """
    clips, parts = data.train_set.clips, (model, loss_function, optimizer)
    batches, shapes = largest_batches(clips, data.sampler, epochs)
    try_shapes(*parts, shapes, text_shapes(data.val_set.clips, data.val_batches))
    try_batches(*parts, data.train_set, batches, check_stop)  # beside the graphs of all shapes
    agree_on_decoder(model.decoder)
    check_stop()


def try_batches(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: Optimizer,
    dataset: MelDataset,
    batches: Sequence[Sequence[int]],
    check_stop: Callable[[], None],
) -> None:
    """Runs forward and backward passes of each batch (see :func:`try_run`)."""
    with unchanged(model):
        for indices in batches:
            items = [dataset[i] for i in indices]
            n_fitting = largest_fitting(model, loss_function, optimizer, items)
            if n_fitting < len(items):
                fix = _suggestion(n_fitting / len(items), dataset, model.hparams)
                batch = collate(items, model.hparams.n_frames_per_step)
                raise UserError(f"{too_large(batch)}; {fix}")
            check_stop()


def try_shapes(
    model: Tacotron2,
    loss_function: Tacotron2Loss,
    optimizer: Optimizer,
    training: Iterable[tuple[int, int]],
    validation: Iterable[tuple[int, int]],
) -> None:
    """Runs a short batch of each shape (B, T_in) that has CUDA graphs of its own: they are captured
    now, and so are their failures, and their memory is seen. None has without decoder=triton. If
    their memory runs out, the model uses scan, unless triton was asked for.

    Raises:
        UserError: memory runs out.
    """
    hparams, decoder = model.hparams, model.decoder
    # So long that all graphs are used, of attention and the second LSTM alone and of both together.
    T_out = (scan.SEGMENT + scan.STEPS) * hparams.n_frames_per_step

    def train(items: list[Item]) -> None:
        if error := memory_error(model, loss_function, optimizer, items):
            raise error

    @torch.no_grad()
    @full_precision()
    def validate(items: list[Item]) -> None:
        model.eval()
        model(collate(items, hparams.n_frames_per_step).to(next(model.parameters()).device))

    graphs = [(train, shape) for shape in decoder.graph_shapes(training)]
    graphs += [(validate, shape) for shape in decoder.graph_shapes(validation)]
    with unchanged(model):
        try:
            title = "capturing CUDA graphs"
            for run, (B, T_in) in progress_bar(graphs, title) if graphs else ():
                if decoder.implementation != "triton":  # it has just failed
                    break
                with_fallback(model, run, [blank(T_in, T_out, hparams.n_mel_channels)] * B)
        except (RuntimeError, MemoryError) as error:
            if not may_be_out_of_memory(error):
                raise
            problem = "the CUDA graphs of all batches need more memory than there is"
            if hparams.decoder != "auto":
                raise UserError(
                    f"{problem}; use decoder=scan, or set a smaller batch_size"
                ) from None
            print(f"note: {fall_back_to_scan(decoder, problem)}")
        model.train()


def text_shapes(clips: Sequence[Clip], batches: Iterable[Sequence[int]]) -> set[tuple[int, int]]:
    """Returns (B, T_in) of batches."""
    return {(len(batch), max(len(clips[i].ids) for i in batch)) for batch in batches}


def largest_fitting(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, items: list[Item]
) -> int:
    """Returns how many of the first ``items`` fit in a batch: all, or some eighths of them, or one,
    or none. With decoder=auto, what does not fit with triton is tried with scan. Raises an error
    that may mean something else than memory if not even one clip passes.
    """
    decoder, error = model.decoder, None
    for n in [*range(len(items), 1, -max(len(items) // 8, 1)), 1]:
        step = memory_error, model, loss_function, optimizer, items[:n]
        error = with_fallback(model, *step)
        if error and decoder.implementation == "triton" and model.hparams.decoder == "auto":
            print(f"note: {fall_back_to_scan(decoder, error)}")
            error = memory_error(*step[1:])
        if not error:
            return n
    if is_out_of_memory(error):
        return 0
    if decoder.implementation == "triton":
        print(f"note: {fall_back_to_scan(decoder, error)}")
        return largest_fitting(*step[1:4], items)
    raise error


def memory_error(
    model: Tacotron2, loss_function: Tacotron2Loss, optimizer: Optimizer, items: list[Item]
) -> Exception | None:
    """Takes a training step, without the optimizer's, on a batch of ``items``. Returns the error
    that says, or may say, that it does not fit in memory; None if it fits."""
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


def blank(T_in: int, T_out: int, n_mels: int) -> Item:
    """Returns a clip of this size."""
    return Item(0, torch.zeros(T_in, dtype=torch.int64), torch.zeros(T_out, n_mels))


def _suggestion(fraction: float, dataset: MelDataset, hparams: HParams) -> str:
    """Says what to set if ``fraction`` of a batch fits in memory."""
    longest = max(padded_frames(clip, hparams) for clip in dataset.clips)
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
