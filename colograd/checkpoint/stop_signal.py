"""SIGTERM and Ctrl-C. They are recorded here, and the trainer acts on them at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StopSignal:
    """A handler that records a signal, so that the trainer can write a checkpoint before it stops.

    A second Ctrl-C interrupts at once, as it would without the handler.

    Args:
        speaks: answer Ctrl-C with a line, because the end of the round may take a while.
    """

    def __init__(self, speaks: bool = False) -> None:
        self.received = ""  # name of the first signal
        self._speaks = speaks
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers. Only the main thread can; in another (a notebook's worker) this does nothing."""
        self.received = ""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            self._previous = {number: signal.signal(number, self._notice) for number in NAMES}

    def remove(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            self.remove()
            raise KeyboardInterrupt
        self.received = self.received or NAMES[signal.Signals(number)]
        if number == signal.SIGINT and self._speaks:  # not with print: the signal may interrupt one
            os.write(2, b"\nCtrl-C: the run ends with a checkpoint after this round; a second one ends it at once\n")
