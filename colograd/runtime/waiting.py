"""Progress lines until a run is ready. The module has few imports, so that the first line precedes slow imports."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

TURNING = "|/-\\"
EVERY = 0.2  # Seconds between two updates of the stage.
LONG = 5.0  # Seconds after which a stage is printed if there is no terminal.


class Waiting:
    """Context manager that shows progress during a slow block, such as imports. A terminal shows the present stage and
    the seconds; elsewhere ``first`` is printed at once, then each long stage. ``shown`` is False on silent ranks."""

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

            self._bar = tqdm(bar_format="{desc}", leave=False)  # tqdm lets `Console.say` print lines above the bar.
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
