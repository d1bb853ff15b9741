"""Several processes that train one model together, one on each GPU, as torchrun starts them:

    torchrun --nproc_per_node=2 train.py -o runs/first

Rank 0, the first of them, prints, logs and saves. Without torchrun there is one process, and what
is here does nothing.
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
from layers import preserved_buffers

_TORCHRUN = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE = (  # local: of those on this machine
    int(os.environ[name]) if _TORCHRUN else alone
    for name, alone in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)
    )
)  # fmt: skip
SEVERAL = WORLD_SIZE > 1
# If a process dies, torchrun ends them all; a time-out ends those that hang. On CPUs it is longer
# than any work of rank 0 that the others wait for, such as computing mels.
TIMEOUT = timedelta(days=1)
GPU_TIMEOUT = timedelta(hours=1)  # every step needs the GPUs' group, so a hang ends by this
_gpus = None  # the group of the GPUs; None on CPUs: the group of all
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


def replicated(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> nn.Module:
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
    with preserved_buffers(model):
        loss(replicas).backward()
    model.zero_grad()
    return replicas


def broadcast_buffers(model: nn.Module) -> None:
    """Takes batch norm's running means from rank 0, which saves them. (DDP does so at the start of
    a step, not at its end.)"""
    for buffer in model.buffers() if SEVERAL else ():
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


def gathered(value: Any) -> list[Any]:
    """Returns the values of all processes, by rank."""
    values = [value] * WORLD_SIZE
    if SEVERAL:
        torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def explained() -> Iterator[None]:
    """Turns the loss of another process into a :class:`UserError`."""
    try:
        yield
    except RuntimeError as error:
        if not SEVERAL:
            raise
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise UserError(
            "one of the processes has ended, by an error above or killed, perhaps out of memory; "
            "--resume continues from the newest checkpoint"
        ) from None


def first_to_fail() -> bool:
    """Returns whether this process is the first that asks. The others only fail because it did."""
    if not _store:
        return True
    return _store.compare_set("failed", "", str(RANK)) == str(RANK).encode()


def end(status: int) -> NoReturn:
    """Ends the process. One of several skips Python's own cleanup: PyTorch's threads may still free
    tensors, and abort the process if the interpreter is gone by then."""
    if SEVERAL:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
