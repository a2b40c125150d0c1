"""Detect a rank that hangs: its training thread hasn't called `progress` for `rank_timeout` seconds.

A rank that waits for other ranks or the Hub doesn't hang: its training thread is in `finish`, or in a function of the
modules `WAITING`. If all threads of a process are stopped, e.g. by SIGSTOP, other ranks detect this (see `faults`). At
most half of `rank_timeout` is counted between two checks, so that a stopped process isn't ended when it continues."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist

LIMIT = 1500.0  # Default of `rank_timeout`. After 1,800 s a collective would fail without naming a rank.
TICK = 2.0  # Maximum seconds between two checks for progress.
STDERR = 2  # File descriptor of standard error. A notebook's sys.stderr has no descriptor.
# Modules with functions that wait for other ranks, or for the Hub.
WAITING = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "huggingface_hub.file_download",
    "huggingface_hub._snapshot_download",
    "huggingface_hub.hf_api",
)

_limit: float | None = LIMIT
_stage = ""
_count = 0


def set_limit(seconds: float | None) -> None:
    global _limit
    _limit = seconds


def limit() -> float | None:
    return _limit


def stage() -> str:
    return _stage


def progress(stage: str = "") -> None:
    """Report that this rank makes progress. ``stage`` names the rank's present work, for error messages."""
    global _stage, _count
    _stage = stage or _stage
    _count += 1


def finish(work: dist.Work) -> None:
    work.wait()
    progress()


class Watchdog:
    """A thread that watches the training thread, and calls ``end`` with a description if the training thread hangs.

    Every check also calls ``each`` with the seconds since the last check."""

    def __init__(self, end: Callable[[str], None], each: Callable[[float], None] = lambda passed: None) -> None:
        self._end, self._each = end, each
        self._watched: int | None = None
        self._idle = 0.0  # Seconds that the training thread has made no progress.
        self._seen: int | None = None  # `_count` at the last check. None: the thread waited, or wasn't watched.
        self._is_armed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colograd-watchdog", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Watch the calling thread while the body runs. Afterwards the thread may idle, e.g. at a notebook's prompt."""
        progress(what)
        if self._watched is not None:
            yield
            return
        self.start()
        self._watched = threading.get_ident()
        self._arm(_limit)
        try:
            yield
        finally:
            self._watched = None
            self._arm(None)
            progress("what follows " + what)

    def look(self, passed: float) -> None:
        self._each(passed)
        frame = None if self._watched is None else sys._current_frames().get(self._watched)
        is_watched = _limit is not None and frame is not None and not waits(frame)
        self._arm(_limit if is_watched else None)
        count = _count if is_watched else None
        self._idle = self._idle + passed if count is not None and count == self._seen else 0.0
        self._seen = count
        if _limit is not None and frame is not None and self._idle > _limit:
            description = describe(self._idle, frame)
            faulthandler.dump_traceback(STDERR, all_threads=True)
            self._end(description)

    def _arm(self, seconds: float | None) -> None:
        """Make `faulthandler` write all stacks soon after ``seconds`` (None: never), unless `_arm` is called again.

        If a call holds the GIL, the watchdog's thread can't run, but `faulthandler` can."""
        if seconds is not None:
            faulthandler.dump_traceback_later(seconds + 2 * tick(), file=STDERR)
        elif self._is_armed:
            faulthandler.cancel_dump_traceback_later()
        self._is_armed = seconds is not None

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(tick()):
            now = time.monotonic()
            self.look(min(now - last, (_limit or LIMIT) / 2))
            last = now
        self._arm(None)


def tick() -> float:
    return TICK if _limit is None else min(TICK, _limit / 10)


def waits(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is finish.__code__ or frame.f_globals.get("__name__", "").startswith(WAITING):
            return True
        frame = frame.f_back
    return False


def describe(idle: float, frame: FrameType | None) -> str:
    calls: list[str] = []
    while frame is not None and len(calls) < 4:
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return (
        f"made no progress for {idle:,.0f} s (rank_timeout) in {_stage}: it is in {', called by '.join(calls)}. Its "
        "output has the stacks of all its threads. If a reward function or tool may hang, set reward_timeout or "
        "tool_timeout; if it is slow, raise rank_timeout."
    )
