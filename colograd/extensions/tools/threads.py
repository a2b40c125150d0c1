"""Daemon threads: one for each call of a tool, one for each environment."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from ...usercode.calls import Outcome, awaited_outcome, event_loop, raised_outcome

# Python's errors when another thread sets a signal handler (for `signal.alarm`), or uses a connection that the main
# thread opened. Only the main thread may do these.
NEEDS_MAIN = ("signal only works in main thread", "SQLite objects created in a thread can only be used in that same")
PIECE = 0.2  # maximum seconds of one wait


@dataclass(frozen=True, slots=True)
class UserCall:
    """A call of the user's code, and the future that gets its outcome."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    future: Future[Outcome] = field(default_factory=Future)

    def run(self) -> None:
        """Run the call in this thread, unless it has run or was cancelled."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        started = time.perf_counter()
        try:
            value = self.function(**self.arguments)
            if inspect.isawaitable(value):  # an environment's async method, in the order of its calls
                outcome = asyncio.run_coroutine_threadsafe(awaited_outcome(value, None), event_loop()).result()
            else:
                outcome = Outcome("value", value, time.perf_counter() - started)
        except BaseException as error:  # SystemExit too: it would end the thread, and the conversation wait for ever
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            outcome = raised_outcome(error)
        self.future.set_result(outcome)


class EnvironmentThread:
    """Makes one environment and runs its sync methods, in one thread.

    An environment's database connection or browser may be bound to the thread that opened it.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

        def run() -> None:
            while (work := self._work.get()) is not None:
                work()

        threading.Thread(target=run, name="colograd-environment", daemon=True).start()

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function. Return a future for its result or exception."""
        future = Future[Any]()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(on_this_device(work))
        return future

    def close(self) -> None:
        """End the thread after the queued functions."""
        self._work.put(None)


class MainThreadAdvice:
    """Warns once per name that a call failed because it needs the main thread, and moves the tool there if possible."""

    def __init__(self) -> None:
        self._advised: set[str] = set()
        # Moves a tool's later calls to the main thread. False: impossible, as for an environment's methods.
        self.move: Callable[[str], bool] = lambda name: False

    def give(self, name: str, outcome: Outcome) -> None:
        """Warn if the traceback contains one of the texts in `NEEDS_MAIN`."""
        if name in self._advised or outcome.kind != "raised" or not any(p in outcome.value[1] for p in NEEDS_MAIN):
            return
        self._advised.add(name)
        remedy = f"set main_thread_tools: [{name}]"
        if self.move(name):
            remedy = f"from now on it runs there (from the first call with main_thread_tools: [{name}])"
        warnings.warn(
            f"{name} failed outside the main thread, which alone may set a signal handler or use a connection that was "
            f"opened there: {remedy}, and the engine waits meanwhile. With tool_workers a tool runs in a process of "
            "its own.",
            stacklevel=3,
        )


def wait_for_result(future: Future[Any]) -> Any:
    """Wait for the result in short pieces, as an exception that interrupts this thread isn't raised during a wait."""
    while not future.done():
        wait([future], timeout=PIECE)
    return future.result()


def on_this_device(work: Callable[[], None]) -> Callable[[], None]:
    """Return the work for another thread, with this thread's CUDA device. A new thread has the default device."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if used else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return run
