"""One event loop for the async functions of the user: rewards and tools both."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable
from typing import Any

from .outcome import Outcome

GRACE = 10.0  # seconds for a stuck function to notice that it was interrupted


async def awaited_outcome(awaitable: Awaitable[Any], timeout: float | None) -> Outcome:
    """What a user's awaitable returns, or ``late`` after ``timeout`` seconds; what it raises is raised.

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
    return Outcome("value", task.result(), time.perf_counter() - started)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole run, not one per group: HTTP clients that users keep between calls are bound to theirs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="colograd-async", daemon=True).start()
    return loop
