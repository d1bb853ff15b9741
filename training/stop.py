"""Stopping by Ctrl-C or a signal: after the batch that is being trained, with a checkpoint."""

import os
import signal
from collections.abc import Callable


class Stopped(Exception):
    """SIGINT or SIGTERM asked the training to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # the shells' convention: 130 and 143


class StopSignals:
    """Notes SIGINT and SIGTERM, for :meth:`check` to raise once a batch is done.

    A second signal ends the process at once.

    Args:
        agree: for one of several processes: given the number of its signal, or 0, returns that of
            any of them, so that all stop after the same batch. They call :meth:`check` together.
            A second signal is then ignored: torchrun sends it, and later kills.
    """

    def __init__(self, agree: Callable[[int], int] | None = None) -> None:
        self.agree, self.number = agree, 0

    def __enter__(self) -> "StopSignals":
        numbers = signal.SIGINT, signal.SIGTERM
        self.handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        # One of several processes has still to say why it ends, whatever torchrun sends.
        for number, handler in self.handlers.items():
            signal.signal(number, signal.SIG_IGN if self.agree else handler)

    def _note(self, number: int, _: object) -> None:
        self.number = number
        if not self.agree:
            for each in self.handlers:
                signal.signal(each, signal.SIG_DFL)
            os.write(2, f"{signal.Signals(number).name}: saving, then stopping\n".encode())

    def check(self) -> None:
        """Raises :class:`Stopped` if there was a signal."""
        if number := self.agree(self.number) if self.agree else self.number:
            raise Stopped(number)
