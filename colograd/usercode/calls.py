"""One call of the user's code: how it ended, and what ends it when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .worker_process import COLOGRAD, line_and_traceback

STDLIB = sysconfig.get_path("stdlib")
LIBRARIES = (f"{os.sep}site-packages{os.sep}", os.path.join(STDLIB, ""), os.path.join(COLOGRAD, ""))
GRACE = 10.0  # seconds for a stuck function to notice that it was interrupted


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    kind: str  # value, raised, late, died or dropped
    value: Any  # what was returned; (line, traceback) of what was raised; the exit status of what died
    seconds: float  # in the function
    logged: tuple[dict[str, list[Any]], dict[str, list[float]]] = ({}, {})  # columns and metrics, see `CallLog`


def raised_outcome(error: BaseException) -> Outcome:
    return Outcome("raised", line_and_traceback(error), 0.0)


def place_of(function: Any) -> str:
    """Where a function begins, as ``file.py:12``; empty for one whose source isn't known."""
    while isinstance(function, functools.partial):
        function = function.func
    called = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(called, "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def place_in(traceback: str) -> str:
    """The last place of a traceback's text that is neither ours nor a library's; empty: there is none."""
    frames = re.findall(r'^ +File "([^"<]+)", line (\d+), in ', traceback, re.MULTILINE)
    own = [frame for frame in frames if not any(folder in frame[0] for folder in LIBRARIES)]
    return _place(*own[-1]) if own else ""


def _place(file: str, line: int | str) -> str:
    near = os.path.relpath(file)
    return f"{file if near.startswith(os.pardir) else near}:{line}"


def when_done(call: Future[Outcome], tell: Callable[[float, float], None]) -> None:
    """``tell(started, ended)``, by `time.perf_counter`, when the call is over or given up: from whichever thread ends
    it. The start is that of the function, where that is known."""
    submitted = time.perf_counter()

    def done(call: Future[Outcome]) -> None:
        ended = time.perf_counter()
        seconds = 0.0 if call.cancelled() or call.exception() else call.result().seconds
        tell(ended - seconds if seconds else submitted, ended)

    call.add_done_callback(done)


async def awaited_outcome(awaitable: Awaitable[Any], timeout: float | None) -> Outcome:
    """How a user's awaitable ends: ``late`` after ``timeout`` seconds.

    It can neither end the event loop (by SystemExit) nor, unlike under `asyncio.wait_for`, hold it up by ignoring that
    it is cancelled.
    """

    async def guarded() -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    started = time.perf_counter()
    task = asyncio.ensure_future(guarded())
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()  # where it isn't done: it is late, or nobody wants it any more
    if not done:
        return Outcome("late", None, timeout or 0.0)
    try:
        return Outcome("value", task.result(), time.perf_counter() - started)
    except (Exception, asyncio.CancelledError) as error:
        return raised_outcome(error)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole run, not one per group: HTTP clients that users keep between calls are bound to theirs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="colograd-async", daemon=True).start()
    return loop


class _Stuck(BaseException):
    """Raised in a call that took too long. Not an Exception, which user code may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None, problem: str) -> Iterator[None]:
    """Interrupt a block in the trainer's own thread after some seconds; None: never. Where that doesn't end it, nothing
    else can: end the process.

    Raises:
        TimeoutError: ``problem``.
    """
    if seconds is None:
        yield
        return
    thread = ctypes.c_ulong(threading.get_ident())
    running, ended = threading.Lock(), False

    def interrupt() -> None:
        with running:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Stuck))

    def leave() -> None:
        print(problem, file=sys.stderr, flush=True)
        os._exit(1)  # the launcher ends the other ranks

    timers = [threading.Timer(seconds, interrupt), threading.Timer(seconds + GRACE, leave)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        try:
            yield
        finally:
            with running:  # from here on nothing interrupts, and what was about to, doesn't
                ended = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
    except _Stuck:
        raise TimeoutError(problem) from None
    finally:
        for timer in timers:
            timer.cancel()
