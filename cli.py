"""What all programs here share: errors for the user, the argument parser, signals."""

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

# disable=None: shown on a terminal, not in a log
progress_bar = partial(tqdm, disable=None, dynamic_ncols=True)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Something that the user can fix: one line with the location, the value and the fix."""


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a program's ``main``. A :class:`UserError` ends it with its message and status 2."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as set during imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Log files get each line at once, whatever characters their encoding lacks.
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
        fixes = dict.fromkeys(DISK_FULL, "free some space")
        fixes |= dict.fromkeys((errno.EISDIR, errno.ENOTDIR), "move what is there")
        fixes |= dict.fromkeys((errno.EACCES, errno.EROFS), "allow writing, or use another folder")
        if not (fix := fixes.get(error.errno)):
            raise
        message, status = f"error: {error.filename or 'output'}: {error.strerror}; {fix}", 2
        message += ", then run again"
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    # Not in the handlers: their exception would keep loaders and their processes alive.
    print(message, file=sys.stderr)
    sys.exit(status)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, without abbreviations; errors are a :class:`UserError`."""

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
    """SIGINT or SIGTERM asked the training to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # the shells' convention: 130 and 143


class StopSignals:
    """Records SIGINT or SIGTERM, for :meth:`check` to raise once the batch is done.

    A second signal has its usual effect: it ends the process at once.
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
        signal.setitimer(signal.ITIMER_REAL, 1, 1)  # seconds; most batches come within one

    def _stop_waiting(self, *_: object) -> None:
        if self.waiting:
            self.check()

    def check(self) -> None:
        if self.number:
            raise Stopped(self.number)

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """While no batch is being trained, a signal is raised within a second."""
        self.waiting = True
        try:
            self.check()
            yield
        finally:
            self.waiting = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back Ctrl-C until the context ends. Processes started in it never receive it."""
    received = []
    handler = signal.signal(signal.SIGINT, lambda *call: received.append(call))
    # The mask is for new processes. In this one another thread may still get the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])
