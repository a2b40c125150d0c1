"""Progress lines until a run is ready. The module has few imports, so that the first line precedes slow imports."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TURNING = "|/-\\"
EVERY = 0.2  # Seconds between two looks at the present stage.
LONG = 5.0  # Without a terminal, a stage is printed once it has lasted this many seconds.


@contextlib.contextmanager
def while_waiting(first: str, stage: Callable[[], str], shown: bool = True) -> Iterator[None]:
    """Show progress during a slow block, such as imports. A terminal shows the present stage and the seconds. Without a
    terminal, print ``first`` at once, then each stage once it has lasted 5 s."""
    if not shown:
        yield
        return
    bar, ended = None, threading.Event()
    if sys.stderr.isatty():
        from tqdm.auto import tqdm

        bar = tqdm(bar_format="{desc}", leave=False)  # tqdm lets `Console.say` print lines above the bar.
    else:
        print(first, flush=True)
    thread = threading.Thread(target=_show, args=(first, stage, bar, ended), name="colograd-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if bar is not None:
            bar.close()


def _show(first: str, stage_of: Callable[[], str], bar: Any, ended: threading.Event) -> None:
    began = since = time.monotonic()
    told = stage = first
    for turn in itertools.count():
        now, before = time.monotonic(), stage
        stage = stage_of() or first
        since = now if stage != before else since
        if bar is not None:
            bar.set_description_str(f"{TURNING[turn % len(TURNING)]} {stage} ({now - began:.0f} s)")
        elif stage != told and now - since >= LONG:
            print(f"{stage} ({now - began:.0f} s since the start)", flush=True)
            told = stage
        if ended.wait(EVERY):
            return
