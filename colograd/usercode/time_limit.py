"""A time limit for user code that runs in the trainer's own thread, where nothing else can end it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

from .event_loop import GRACE


class _Stuck(BaseException):
    """Raised in a call that took too long. Not an Exception, which user code may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None, problem: str) -> Iterator[None]:
    """Interrupt the block after some seconds; None: never. Where that doesn't end it either, end the process.

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
