"""Detection of ranks that hang: the training thread marks its progress here, and a second thread checks the marks.

A rank that waits for others doesn't hang. The watchdog recognises waiting by the stack: every collective of torch,
transformers and vLLM passes through the same few modules. A process that runs none of its threads is detected by other
ranks, from its missing signs of life (see `faults`). Time is counted in ticks of the watchdog's thread, so that no time
passes while the process is stopped.
"""

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

LIMIT = 1500.0  # seconds without progress; below the 1,800 of a collective: its error doesn't name the missing rank
TICK = 2.0  # most seconds between two checks
LEAST_SILENCE = 5.0  # least seconds without a sign of life that count as silence
STDERR = 2  # the file descriptor, because a notebook's sys.stderr has none
# Modules in which a rank waits for another rank, or for the Hub, which has its own time limits.
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
    """Set how long a rank may make no progress (`rank_timeout`); None: without limit."""
    global _limit
    _limit = seconds


def limit() -> float | None:
    return _limit


def stage() -> str:
    return _stage


def progress(stage: str = "") -> None:
    """Mark progress of the training thread, and set its stage unless ``stage`` is empty. Costs next to nothing."""
    global _stage, _count
    _stage = stage or _stage
    _count += 1


def finish(work: dist.Work) -> None:
    """Wait for a collective. The watchdog knows that the rank waits for others here."""
    work.wait()
    progress()


class Idle:
    """A timer of how long a count has stayed the same, by the caller's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count: int | None = None

    def look(self, count: int | None, passed: float) -> float:
        """Return how many seconds the count has stayed the same, ``passed`` seconds after the last call. None always
        counts as a change."""
        is_same = count is not None and count == self._count
        self.seconds = self.seconds + passed if is_same else 0.0
        self._count = count
        return self.seconds

    def is_silent(self, count: int | None, passed: float) -> bool:
        """Return whether the count of a process's signs of life has stayed the same for too long."""
        silent = self.look(count, passed)
        return _limit is not None and silent > max(_limit, LEAST_SILENCE)


class Watchdog:
    """A thread that checks whether the training thread makes progress. ``end`` ends the process; it gets a description
    of a hang, with the stacks of all threads in standard error. Each check calls ``each`` with the seconds since the
    last."""

    def __init__(self, end: Callable[[str], None], each: Callable[[float], None] = lambda passed: None) -> None:
        self._end, self._each = end, each
        self._watched: int | None = None  # id of the training thread; None outside of `inside`
        self._idle = Idle()
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
        """Watch the calling thread in the body. Outside of bodies it may rest, as at a notebook's prompt."""
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
        """Check the progress, ``passed`` seconds after the last check. End the process after too long without any."""
        self._each(passed)
        frame = None if self._watched is None else sys._current_frames().get(self._watched)
        is_watched = _limit is not None and frame is not None and not waits(frame)
        self._arm(_limit if is_watched else None)
        idle = self._idle.look(_count if is_watched else None, passed)
        if _limit is not None and frame is not None and idle > _limit:
            description = describe(idle, frame)
            faulthandler.dump_traceback(STDERR, all_threads=True)
            self._end(description)

    def _arm(self, seconds: float | None) -> None:
        """Let `faulthandler` write the stacks after so many seconds if this thread can't: a call may hold the GIL."""
        if seconds is not None:
            faulthandler.dump_traceback_later(seconds + 2 * tick(), file=STDERR)
        elif self._is_armed:
            faulthandler.cancel_dump_traceback_later()
        self._is_armed = seconds is not None

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(tick()):
            now = time.monotonic()
            # If all processes were stopped for an hour, this rank hasn't hung for an hour.
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
    """Return the message about a rank that made no progress for ``idle`` seconds. ``frame`` is its stack."""
    calls: list[str] = []
    while frame is not None and len(calls) < 4:
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return (
        f"made no progress for {idle:,.0f} s (rank_timeout) in {_stage}: it is in {', called by '.join(calls)}. Its "
        "output has the stacks of all its threads. If a reward function or tool may hang, set reward_timeout or "
        "tool_timeout; if it is slow, raise rank_timeout."
    )
