"""Call the user's code with a time limit and return the outcome. Find the file and line of a function or an error."""

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
GRACE = 10.0  # Seconds after a call's time limit before the process ends or the call counts as failed.


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str  # One of: value, raised, late, died (the worker), dropped (no longer needed).
    value: Any  # For value: the result. raised: (line, traceback). died: exit status.
    seconds: float
    logged: tuple[dict[str, list[Any]], dict[str, list[float]]] = ({}, {})


def raised_outcome(error: BaseException) -> Outcome:
    return Outcome("raised", line_and_traceback(error), 0.0)


def unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def place_of(function: Any) -> str:
    """Return a function's file and first line as ``file.py:12``, or "" if they are unknown."""
    function = unwrapped(function)
    called = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(called, "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def place_in(traceback: str) -> str:
    frames = re.findall(r'^ +File "([^"<]+)", line (\d+), in ', traceback, re.MULTILINE)
    own = [frame for frame in frames if not any(folder in frame[0] for folder in LIBRARIES)]
    return _place(*own[-1]) if own else ""


def _place(file: str, line: int | str) -> str:
    near = os.path.relpath(file)
    return f"{file if near.startswith(os.pardir) else near}:{line}"


def when_done(call: Future[Outcome], tell: Callable[..., None], *further: Any) -> None:
    """When ``call`` ends, pass its start and end (times of `time.perf_counter`) and ``further`` to ``tell``."""
    submitted = time.perf_counter()

    def done(call: Future[Outcome]) -> None:
        ended = time.perf_counter()
        seconds = 0.0 if call.cancelled() or call.exception() else call.result().seconds
        tell(ended - seconds if seconds else submitted, ended, *further)

    call.add_done_callback(done)


async def awaited_outcome(awaitable: Awaitable[Any], timeout: float | None) -> Outcome:
    """Await a user's awaitable and return its outcome. SystemExit counts as an error of the call."""

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
        task.cancel()
    if not done:
        return Outcome("late", None, timeout or 0.0)
    try:
        return Outcome("value", task.result(), time.perf_counter() - started)
    except (Exception, asyncio.CancelledError) as error:
        return raised_outcome(error)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop for async user code. An HTTP client needs the same loop in all calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="colograd-async", daemon=True).start()
    return loop


class Late(BaseException):
    """Raised in a call that exceeds its time limit. User code may catch every `Exception`, so this class isn't one."""


@contextlib.contextmanager
def time_limit(seconds: float | None, problem: str) -> Iterator[None]:
    """Raise `Late` in the `with` block after ``seconds`` (None: never). If the block still runs `GRACE` seconds later,
    print ``problem`` and end the process."""
    if seconds is None:
        yield
        return
    thread = ctypes.c_ulong(threading.get_ident())
    running, ended = threading.Lock(), False

    def interrupt() -> None:
        with running:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Late))

    def leave() -> None:
        print(problem, file=sys.stderr, flush=True)
        os._exit(1)

    # Python 3.11 could raise `Late` while this thread starts a timer. So the timer that raises `Late` starts last.
    timers = [threading.Timer(seconds + GRACE, leave), threading.Timer(seconds, interrupt)]
    try:
        for timer in timers:
            timer.daemon = True
            timer.start()
        yield
    finally:
        with running:  # After this the timer can't raise `Late`, and a pending `Late` is cancelled.
            ended = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
        for timer in timers:
            timer.cancel()
