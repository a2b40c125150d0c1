"""Whether ranks get on: who trains marks its progress here, and a thread beside it notices when there is none.

A rank that waits for others isn't to blame. That it waits is read from its stack: every exchange of torch, transformers
and vLLM goes by the same few modules. A process whose threads don't run at all is missed by the others, for which
`faults` sends signs of life. Time is counted in ticks of the thread: while a process is stopped its clock stands still.
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

LIMIT = 1500.0  # seconds without progress; below the 1,800 after which an exchange gives up, and can't say on whom
TICK = 2.0  # seconds between two looks, at most
LEAST_SILENCE = 5.0  # seconds in which a process that is well has said so
STDERR = 2  # by its number: sys.stderr may be a notebook's, which has none
# Modules that a rank is in while it waits for another one, or for the Hub, which has limits of its own.
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
    """How long a rank may make no progress (`rank_timeout`); None: as long as it likes."""
    global _limit
    _limit = seconds


def limit() -> float | None:
    return _limit


def stage() -> str:
    """What this rank was last said to be at."""
    return _stage


def progress(stage: str = "") -> None:
    """Mark that the thread that trains gets on, and is now at ``stage``; empty: at the same. Costs next to nothing."""
    global _stage, _count
    _stage = stage or _stage
    _count += 1


def finish(work: dist.Work) -> None:
    work.wait()
    progress()


class Idle:
    """How long a count has stayed the same, by the clock of who looks at it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count: int | None = None

    def look(self, count: int | None, passed: float) -> float:
        """Seconds, of which ``passed`` went by since the last look. None is never the same."""
        is_same = count is not None and count == self._count
        self.seconds = self.seconds + passed if is_same else 0.0
        self._count = count
        return self.seconds

    def is_silent(self, count: int | None, passed: float) -> bool:
        """Whether a process whose signs of life are counted has given none for too long."""
        silent = self.look(count, passed)
        return _limit is not None and silent > max(_limit, LEAST_SILENCE)


class Watchdog:
    """A thread that looks whether the thread that trains makes progress.

    Args:
        end: ends the process, given what to tell, after the stacks of all threads were written to standard error.
        each: is called at each look with the seconds since the last one.
    """

    def __init__(self, end: Callable[[str], None], each: Callable[[float], None] = lambda passed: None) -> None:
        self._end, self._each = end, each
        self._watched: int | None = None  # the thread that trains, while it does
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
        """A body in which this thread must make progress; elsewhere it may rest, as at a notebook's prompt."""
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
        """After ``passed`` seconds: end the process if there was no progress for too long."""
        self._each(passed)
        frame = None if self._watched is None else sys._current_frames().get(self._watched)
        is_watched = _limit is not None and frame is not None and not waits(frame)
        self._arm(_limit if is_watched else None)
        idle = self._idle.look(_count if is_watched else None, passed)
        if _limit is not None and frame is not None and idle > _limit:
            said = told(idle, frame)
            faulthandler.dump_traceback(STDERR, all_threads=True)
            self._end(said)

    def _arm(self, seconds: float | None) -> None:
        """Have the stacks written should this thread not run either: a call may hold Python's lock and never return."""
        if seconds is not None:
            faulthandler.dump_traceback_later(seconds + 2 * tick(), file=STDERR)
        elif self._is_armed:
            faulthandler.cancel_dump_traceback_later()
        self._is_armed = seconds is not None

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(tick()):
            now = time.monotonic()
            # A process that was stopped for an hour, with all others, has not idled for an hour.
            self.look(min(now - last, (_limit or LIMIT) / 2))
            last = now
        self._arm(None)


def tick() -> float:
    """Seconds between two looks."""
    return TICK if _limit is None else min(TICK, _limit / 10)


def waits(frame: FrameType | None) -> bool:
    """Whether a thread with that stack waits for others."""
    while frame is not None:
        if frame.f_code is finish.__code__ or frame.f_globals.get("__name__", "").startswith(WAITING):
            return True
        frame = frame.f_back
    return False


def told(idle: float, frame: FrameType | None) -> str:
    """What to say of this rank, without its number."""
    calls: list[str] = []
    while frame is not None and len(calls) < 4:
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return (
        f"made no progress for {idle:,.0f} s (rank_timeout) in {_stage}: it is in {', called by '.join(calls)}. Its "
        "output has the stacks of all its threads. For what may hang set reward_timeout or tool_timeout, for what is "
        "slow a larger rank_timeout."
    )
