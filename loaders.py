"""Processes that load clips for training, or compute something of every clip."""

import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextlib import nullcontext as uninterrupted
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from cli import UserError, progress_bar
from training.device import n_cores


@contextmanager
def open_loader(
    dataset: Any,
    batches: Iterable[list[int]],
    collate: Callable[[list], Any],
    num_workers: int,
    pin_memory: bool = False,
) -> Iterator[DataLoader]:
    """A loader of ``batches`` (lists of indices), whose processes serve all epochs. They start
    here, before any batch is planned, and end with the context. Left to the garbage collector,
    they would live as long as anything refers to a loader, such as a library that keeps an
    exception.
    """
    # train.py has its own note if there are more workers than cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loader = DataLoader(
        dataset,
        batch_sampler=_Batches(batches),
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own, so that it draws nothing from training's
    )
    try:
        with uninterrupted():  # processes inherit this: only the main one sees Ctrl-C
            list(loader)
        yield loader
    finally:
        if (iterator := loader._iterator) is not None:
            _end(iterator)


def _end(iterator: Any) -> None:
    with uninterrupted():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise their deaths
        for worker in iterator._workers:
            worker.kill()
            worker.join()
        # In a thread: torch waits for a lock that a process may have held when it was killed.
        thread = threading.Thread(target=iterator._shutdown_workers, daemon=True)
        thread.start()
        thread.join(timeout=2)


class _Batches:
    """``batches``, but none the first time, when a loader only starts its processes."""

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self.batches, self.started = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which runs at the first batch: DataLoader calls iter() twice an epoch.
        if self.started:
            yield from self.batches
        self.started = True


def loaded(
    loader: DataLoader, waiting: Callable[[], AbstractContextManager] = nullcontext
) -> Iterator[Any]:
    """The batches of a loader. The time spent waiting for each is in a ``waiting()`` context.

    Raises:
        UserError: a clip cannot be used, or a loader process was killed.
    """
    try:
        batches = iter(loader)  # may fail too if a process has died
        # Torch would raise the death of a process mid-step; next() raises it as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while True:
            with waiting():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
    except UserError as error:  # torch puts the traceback of the process before the message
        raise UserError(str(error).rpartition("UserError: ")[2].rstrip()) from None
    except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
            raise
        with waiting():  # a signal may have reached all processes
            raise UserError(
                "a loader process was killed, perhaps out of memory; free some, or --resume with "
                "a smaller num_workers"
            ) from None


def run_parallel(function: Callable, items: Sequence, name: str) -> Iterator:
    """Results of ``function(item)`` in the order of the items, computed on all cores."""
    indices = [[i] for i in range(len(items))]
    n_workers = n_cores() if len(items) > 8 else 0
    with open_loader(items, indices, partial(_apply, function), n_workers) as loader:
        yield from progress_bar(loaded(loader), name, len(items), unit="clip")


def _apply(function: Callable, items: list) -> Any:
    return function(items[0])
