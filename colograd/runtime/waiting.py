"""What a command is at until its run is ready. Imports little: the first line comes before libraries that take long."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

TURNING = "|/-\\"
EVERY = 0.2  # seconds between two looks at the stage
LONG = 5.0  # seconds after which a stage has a line, where no line turns


class Waiting:
    """A block that takes long. ``first`` is said at once; then a line turns in a terminal, with the stage and the
    seconds, and elsewhere each stage that takes long has a line.

    Args:
        stage: says what the process is at; empty: at ``first``, still.
        shown: False on ranks that say nothing.
    """

    def __init__(self, first: str, stage: Callable[[], str], shown: bool = True) -> None:
        self._first, self._stage, self._shown = first, stage, shown
        self._bar: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colograd-waiting", daemon=True)

    def __enter__(self) -> None:
        if not self._shown:
            return
        if sys.stderr.isatty():
            from tqdm.auto import tqdm

            self._bar = tqdm(bar_format="{desc}", leave=False)  # `Console.say` prints above it
        else:
            print(self._first, flush=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._shown:
            self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def _run(self) -> None:
        began = since = time.monotonic()
        told = stage = self._first
        for turn in itertools.count():
            now, before = time.monotonic(), stage
            stage = self._stage() or self._first
            since = now if stage != before else since
            if self._bar is not None:
                self._bar.set_description_str(f"{TURNING[turn % len(TURNING)]} {stage} ({now - began:.0f} s)")
            elif stage != told and now - since >= LONG:
                print(f"{stage} ({now - began:.0f} s since the start)", flush=True)
                told = stage
            if self._ended.wait(EVERY):
                return
