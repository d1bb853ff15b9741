"""Several processes train one model together, one on each GPU, as torchrun starts them:

    torchrun --nproc_per_node=2 train.py -o runs/first

Rank 0, the first of them, prints, logs and saves. Without torchrun there is one process, and the
functions here do nothing.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cli import UserError
from layers import preserve_buffers

_TORCHRUN = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
_VARIABLES = os.environ if _TORCHRUN else {}
RANK = int(_VARIABLES.get("RANK", 0))
WORLD_SIZE = int(_VARIABLES.get("WORLD_SIZE", 1))
LOCAL_RANK = int(_VARIABLES.get("LOCAL_RANK", 0))  # among the processes on this machine
LOCAL_WORLD_SIZE = int(_VARIABLES.get("LOCAL_WORLD_SIZE", 1))
SEVERAL = WORLD_SIZE > 1
# If a process dies, torchrun ends them all. A time-out ends those that hang. On CPUs it is longer
# than any work of rank 0 that the others wait for, such as computing mels.
TIMEOUT = timedelta(days=1)
GPU_TIMEOUT = timedelta(hours=1)  # every step uses the GPUs' group, so this ends a hang
_gpus = None  # the GPUs' group of processes; on CPUs None, which is the default group
_store = None  # torchrun's, in which processes leave messages for each other


def start() -> None:
    """Connects the processes to each other. From here on rank 0 alone prints, but for errors."""
    global _store
    if SEVERAL:
        _store, *_ = next(torch.distributed.rendezvous("env://", timeout=TIMEOUT))
        torch.distributed.init_process_group(
            "gloo", store=_store, rank=RANK, world_size=WORLD_SIZE, timeout=TIMEOUT
        )
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, until the process ends
        warnings.simplefilter("ignore")


@contextmanager
def rank_0_first() -> Iterator[None]:
    """Runs the block in rank 0 before the others: it reports what is wrong, and fills caches."""
    if RANK:
        barrier()
    yield
    if not RANK:
        barrier()


def replicate(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> nn.Module:
    """Returns ``model``, whose backward pass averages the gradients of all processes.

    One backward pass, of ``loss(model)``, is done here and its gradients are dropped. It fixes the
    order in which PyTorch sums gradients, which is then the same in a run that is resumed.
    """
    if not SEVERAL:
        return model
    global _gpus
    if next(model.parameters()).is_cuda:
        # Not in start(): NCCL reads the allocator's settings, which choose_device makes.
        _gpus = torch.distributed.new_group(backend="nccl", timeout=GPU_TIMEOUT)
    replicas = DistributedDataParallel(model, process_group=_gpus)
    with preserve_buffers(model):
        loss(replicas).backward()
    model.zero_grad()
    return replicas


def broadcast_buffers(model: nn.Module) -> None:
    """Gives every process the running means of rank 0's batch norm, which are those that are saved.
    (DDP does so at the start of a step, not at its end.)"""
    if SEVERAL:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0, group=_gpus)


def mean(values: dict[str, float]) -> dict[str, float]:
    """Returns each value's mean over the processes."""
    if not SEVERAL:
        return values
    sums = torch.tensor(list(values.values()), dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    return dict(zip(values, (sums / WORLD_SIZE).tolist(), strict=True))


def largest(value: int) -> int:
    """Returns the largest value of all processes."""
    if not SEVERAL:
        return value
    value = torch.tensor(int(value))
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return int(value)


def barrier() -> None:
    """Waits until all processes have called this."""
    largest(0)


def gather(value: Any) -> list[Any]:
    """Returns the values of all processes, by rank."""
    values = [value] * WORLD_SIZE
    if SEVERAL:
        torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def explain_lost_process() -> Iterator[None]:
    """Raises :class:`UserError` when another process has ended."""
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
        if not (SEVERAL and is_lost):
            raise
        raise UserError(
            "one of the processes has ended, by an error above or killed, perhaps out of memory; "
            "--resume continues from the newest checkpoint"
        ) from None


def first_to_fail() -> bool:
    """Returns whether this process is the first to call this. The others fail as a consequence."""
    if not _store:
        return True
    return _store.compare_set("failed", "", str(RANK)) == str(RANK).encode()


def end(status: int) -> NoReturn:
    """Ends the process. One of several skips Python's cleanup: PyTorch's threads may still free
    tensors, which aborts the process if the interpreter is gone by then."""
    if SEVERAL:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
