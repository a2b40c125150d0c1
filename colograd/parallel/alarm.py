"""A rank's last words, for ranks that wait for it inside of a collective and could never be told there.

An exception on one rank of an engine, in the middle of the engine's step, leaves the others in an exchange that nothing
ends. What happened goes into the process group's store, where a thread of each looks; see `watched`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

KEY = "colograd/alarm"
LOOK = 0.5  # seconds between two looks
GRACE = 5.0  # seconds that a rank has to end by itself once the alarm is there


def sound(text: str) -> None:
    """Tell all ranks what happened on this one. The first alarm stays."""
    if dist.is_initialized() and heard() is None:
        _store().set(KEY, text)


def heard() -> str | None:
    """What happened on some rank; None: nothing that would leave others waiting."""
    if not dist.is_initialized():
        return None
    try:
        return str(_store().get(KEY).decode()) if _store().check([KEY]) else None
    except RuntimeError:  # the rank that holds the store is gone
        return None


def clear() -> None:
    """Forget what an earlier run of this process group told."""
    _store().delete_key(KEY)


@contextmanager
def watched() -> Iterator[None]:
    """The body may wait for a rank that has failed: end this process if there is an alarm and it doesn't leave.

    Nothing else can: a thread can't take another one out of a collective.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK):
            if (told := heard()) is not None and not over.wait(GRACE):
                print(f"colograd: error: {told}", file=sys.stderr, flush=True)
                os._exit(1)

    thread = threading.Thread(target=watch, name="alarm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _store() -> Any:
    return distributed_c10d._get_default_store()
