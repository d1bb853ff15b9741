"""Stopping by Ctrl-C or a signal: after the batch that is being trained, with a checkpoint."""

import os
import signal

from training import distributed


class Stopped(Exception):
    """SIGINT or SIGTERM asked the training to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # the shells' convention: 130 and 143


class StopSignals:
    """Notes SIGINT and SIGTERM, for :meth:`check` to raise once a batch is done.

    A second signal ends the process at once. If there are several processes, it is ignored:
    torchrun sends one, and kills the processes later.
    """

    number = 0  # of the signal; 0: none so far

    def __enter__(self) -> "StopSignals":
        numbers = signal.SIGINT, signal.SIGTERM
        self.handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        # One of several processes still has to print why it ends, whatever torchrun sends.
        for number, handler in self.handlers.items():
            signal.signal(number, signal.SIG_IGN if distributed.SEVERAL else handler)

    def _note(self, number: int, _: object) -> None:
        self.number = number
        if not distributed.SEVERAL:
            for handled in self.handlers:
                signal.signal(handled, signal.SIG_DFL)
            os.write(2, f"{signal.Signals(number).name}: saving, then stopping\n".encode())

    def check(self) -> None:
        """Raises :class:`Stopped` if there was a signal. Several processes call this together, and
        all stop after the same batch."""
        if number := distributed.largest(self.number):
            raise Stopped(number)
