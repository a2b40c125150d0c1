"""SIGTERM: noticed here, acted on by the trainer at the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """Notices SIGTERM and leaves the stopping to the trainer, which first writes a checkpoint."""

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def install(self) -> None:
        """Start listening. Only the main thread may; elsewhere (a notebook's worker) nothing is changed."""
        self.received = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._notice)

    def remove(self) -> None:
        """Restore the handler that was there before."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.received = True
