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
from layers import kept_buffers

_TORCHRUN = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
WORLD_SIZE, RANK, LOCAL_RANK = (
    int(os.environ[name]) if _TORCHRUN else alone
    for name, alone in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
)
SEVERAL = WORLD_SIZE > 1
# Longer than any work of rank 0 that the others wait for. If one dies, torchrun ends them all.
TIMEOUT = timedelta(days=1)


def start() -> None:
    """Connect to torchrun. From here on rank 0 alone prints, but for errors."""
    global _store
    if SEVERAL:
        _store, *_ = next(torch.distributed.rendezvous("env://", timeout=TIMEOUT))
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, until the process ends
        warnings.simplefilter("ignore")


@contextmanager
def rank_0_first() -> Iterator[None]:
    """Rank 0 does what is in the context, such as filling a cache, before the others do it."""
    if RANK:
        _store.wait(["rank 0 has done it"], TIMEOUT)
    yield
    if SEVERAL and not RANK:
        _store.set("rank 0 has done it", "")


def connect() -> None:
    """Connect the processes to each other, for the functions below. Waits for all of them."""
    if SEVERAL:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(
            backend, store=_store, rank=RANK, world_size=WORLD_SIZE, timeout=TIMEOUT
        )


def replicated(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> nn.Module:
    """``model``, whose backward pass averages the gradients of all processes. Batch norm's running
    means stay those of each process, until :func:`take_buffers`.

    The first one, of ``loss(model)``, is done here and forgotten: it decides in which order
    PyTorch sums, which is then the same in a run that is resumed.
    """
    if not SEVERAL:
        return model
    replicas = DistributedDataParallel(model, broadcast_buffers=False)
    with kept_buffers(model):
        loss(replicas).backward()
    model.zero_grad()
    return replicas


def take_buffers(model: nn.Module) -> None:
    """Take batch norm's running means from rank 0, which saves them."""
    for buffer in model.buffers() if SEVERAL else ():
        torch.distributed.broadcast(buffer, 0)


def mean(values: dict[str, float]) -> dict[str, float]:
    """Each value's mean over the processes."""
    if not SEVERAL:
        return values
    sums = torch.tensor(list(values.values()), dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    return dict(zip(values, (sums / WORLD_SIZE).tolist(), strict=True))


def largest(value: int) -> int:
    """The largest value of all processes."""
    if not SEVERAL:
        return value
    value = torch.tensor(int(value))
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return int(value)


def gathered(value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    values = [value] * WORLD_SIZE
    if SEVERAL:
        torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def explained() -> Iterator[None]:
    """Turn the loss of another process into a :class:`UserError`."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
        if not (SEVERAL and lost):
            raise
        raise UserError(
            "one of the processes has ended, by an error above or killed, perhaps out of memory; "
            "--resume continues from the newest checkpoint"
        ) from None


def first_to_fail() -> bool:
    """Whether this process is the first that asks. The others only fail because it did."""
    if not SEVERAL:
        return True
    return _store.compare_set("failed", "", str(RANK)) == str(RANK).encode()


def end(status: int) -> NoReturn:
    """End the process. One of several leaves no time to threads of PyTorch, which may still free
    tensors, and would abort once the interpreter has ended."""
    if SEVERAL:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
