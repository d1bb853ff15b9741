"""What every program here shares: the user's errors, the argument parser, signals."""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from tqdm import tqdm

progress_bar = partial(tqdm, disable=None, dynamic_ncols=True)  # None: on a terminal, not in a log
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Something the person running the program can mend: one line with place, value and fix."""


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a program's ``main``; a :class:`UserError` ends it in plain lines with status 2."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as it was while modules were imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A log file gets its lines as they come, whatever characters it can hold.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        main()
        return
    except UserError as error:
        message, status = f"error: {error}", 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        message, status = "error: output pipe closed", 2
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        place = error.filename or "output"
        message, status = f"error: {place}: {error.strerror}; make room, then call again", 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    # Outside of the handlers, whose exception would keep loaders and their processes alive.
    print(message, file=sys.stderr)
    sys.exit(status)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, without abbreviations; its errors are a :class:`UserError`, in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows the arguments")


def positive(text: str) -> int:
    """An argument's type: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number, 1 or more")
    return int(text)


class Stopped(Exception):
    """SIGINT or SIGTERM asked the training to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # the shells' convention: 130 and 143


class StopSignals:
    """Notes SIGINT and SIGTERM, for :meth:`check` to raise once the batch is done.

    A second signal does what it would without this: it ends the process at once.
    """

    def __enter__(self) -> "StopSignals":
        self.number, self.waiting = 0, False
        numbers = signal.SIGINT, signal.SIGTERM
        self.handlers = {number: signal.signal(number, self._note) for number in numbers}
        self.alarm = signal.signal(signal.SIGALRM, self._stop_waiting)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.alarm)

    def _restore(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.number = number
        self._restore()
        os.write(2, f"{signal.Signals(number).name}: saving, then stopping\n".encode())
        signal.setitimer(signal.ITIMER_REAL, 1, 1)  # seconds, in which most batches come

    def _stop_waiting(self, *_: object) -> None:
        if self.waiting:
            self.check()

    def check(self) -> None:
        if self.number:
            raise Stopped(self.number)

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """For the time in which there is no batch to finish: a signal is raised after a second."""
        self.waiting = True
        try:
            self.check()
            yield
        finally:
            self.waiting = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end of this; processes that start in it never get it."""
    received = []
    handler = signal.signal(signal.SIGINT, lambda *call: received.append(call))
    # The mask is for the processes. It alone would not do: another thread may get the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])
