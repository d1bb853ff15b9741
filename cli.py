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
# and by the first alone of the processes that torchrun starts
_RANK = os.environ["RANK"] if "TORCHELASTIC_RUN_ID" in os.environ else "0"
progress_bar = partial(tqdm, disable=None if _RANK == "0" else True, dynamic_ncols=True)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Something that the user can fix: one line with the location, the value and the fix."""


def exit_on_user_error(
    main: Callable[[], None],
    reports: Callable[[], bool] = lambda: True,
    end: Callable[[Any], NoReturn] = sys.exit,
) -> None:
    """Run a program's ``main``. A :class:`UserError` ends it with its message and status 2.

    Args:
        reports: whether this process prints the message.
        end: ends it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as set during imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Log files get each line at once, whatever characters their encoding lacks.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        main()
        message, status = "", 0
    except UserError as error:
        message, status = f"error: {error}", 2
    except SystemExit as ended:
        message, status = "", ended.code
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
    if message and reports():
        print(message, file=sys.stderr)
    end(status)


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


def seed(text: str) -> int:
    """An argument's type: a seed."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number, 0 to {2**31 - 1}")
    return int(text)


class Stopped(Exception):
    """SIGINT or SIGTERM asked the training to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # the shells' convention: 130 and 143


class StopSignals:
    """Records SIGINT or SIGTERM, for :meth:`check` to raise once the batch is done.

    A second signal has its usual effect: it ends the process at once.

    Args:
        agree: for one of several processes: given the number of its signal, or 0, returns that of
            any of them, so that all stop after the same batch. They call :meth:`check` together.
            A second signal is then ignored: torchrun sends it, and later kills.
    """

    def __init__(self, agree: Callable[[int], int] | None = None) -> None:
        self.agree = agree

    def __enter__(self) -> "StopSignals":
        self.number, self.waiting = 0, False
        numbers = signal.SIGINT, signal.SIGTERM
        self.handlers = {number: signal.signal(number, self._note) for number in numbers}
        self.alarm = signal.signal(signal.SIGALRM, self._stop_waiting)
        return self

    def __exit__(self, *_: object) -> None:
        if self.agree:  # torchrun's signal must not end this process before it says why it ends
            for number in self.handlers:
                signal.signal(number, signal.SIG_IGN)
        else:
            self._restore()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.alarm)

    def _restore(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.number = number
        if self.agree:
            return
        self._restore()
        os.write(2, f"{signal.Signals(number).name}: saving, then stopping\n".encode())
        signal.setitimer(signal.ITIMER_REAL, 1, 1)  # seconds; most batches come within one

    def _stop_waiting(self, *_: object) -> None:
        if self.waiting:
            self.check()

    def check(self) -> None:
        """Raise :class:`Stopped` if there was a signal."""
        if number := self.agree(self.number) if self.agree else self.number:
            raise Stopped(number)

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """While no batch is being trained, a signal is raised within a second. Not in one of
        several processes, since the others may be training."""
        if self.agree:
            yield
            return
        self.waiting = True
        try:
            self.check()
            yield
        finally:
            self.waiting = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back Ctrl-C until the context ends. Processes started in it never receive it, nor
    SIGTERM, which torchrun, among others, sends to all processes of a training."""
    received = []
    handler = signal.signal(signal.SIGINT, lambda *call: received.append(call))
    # The mask is for new processes. In this one another thread may still get the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])
