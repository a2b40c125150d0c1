"""SIGTERM and Ctrl-C: noticed here, acted on by the trainer at the end of a step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StopSignal:
    """Notices a signal and leaves the stopping to the trainer, which first writes a checkpoint.

    A second Ctrl-C interrupts at once, as it would without this.

    Args:
        speaks: answer Ctrl-C with a line, as the end of the round may be far.
    """

    def __init__(self, speaks: bool = False) -> None:
        self.received = ""  # the first signal's name
        self._speaks = speaks
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Start listening. Only the main thread may; elsewhere (a notebook's worker) nothing is changed."""
        self.received = ""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            self._previous = {number: signal.signal(number, self._notice) for number in NAMES}

    def remove(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            self.remove()
            raise KeyboardInterrupt
        self.received = self.received or NAMES[signal.Signals(number)]
        if number == signal.SIGINT and self._speaks:  # not by print: the signal may have come within one
            os.write(2, b"\nCtrl-C: the run ends with a checkpoint after this round; once more ends it at once\n")
