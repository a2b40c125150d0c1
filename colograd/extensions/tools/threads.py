"""Daemon threads that run the user's code: one thread per call of a tool, one thread per environment."""

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

# Texts of Python's errors when a thread other than the main thread sets a signal handler (for `signal.alarm`), or uses
# a database connection that the main thread opened.
NEEDS_MAIN = ("signal only works in main thread", "SQLite objects created in a thread can only be used in that same")
PIECE = 0.2  # maximum seconds of one wait in `wait_for_result`


@dataclass(frozen=True, slots=True)
class UserCall:
    """A call of a user's function, and the future that gets the call's outcome."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    future: Future[Outcome] = field(default_factory=Future)

    def run(self) -> None:
        """Run the call in this thread and set the future. Do nothing if the call has run or was cancelled."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        started = time.perf_counter()
        try:
            value = self.function(**self.arguments)
            if inspect.isawaitable(value):  # async method of an environment; waiting here keeps the order of its calls
                outcome = asyncio.run_coroutine_threadsafe(awaited_outcome(value, None), event_loop()).result()
            else:
                outcome = Outcome("value", value, time.perf_counter() - started)
        except BaseException as error:  # SystemExit would end the thread and leave the conversation without an outcome
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            outcome = raised_outcome(error)
        self.future.set_result(outcome)


class EnvironmentThread:
    """A thread that makes one environment and runs its sync methods.

    A database connection or a browser of an environment may work only in the thread that opened it.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

        def run() -> None:
            while (work := self._work.get()) is not None:
                work()

        threading.Thread(target=run, name="colograd-environment", daemon=True).start()

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function for the environment's thread. Return a future with the function's result or exception."""
        future = Future[Any]()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(on_this_device(work))
        return future

    def close(self) -> None:
        """End the environment's thread once the queued functions have run."""
        self._work.put(None)


class MainThreadAdvice:
    """Warns once about each tool that needs the main thread. Moves the tool's later calls to it if possible."""

    def __init__(self) -> None:
        self._advised: set[str] = set()
        # Function that moves a tool's later calls to the main thread. It returns False for an environment's method.
        self.move: Callable[[str], bool] = lambda name: False

    def give(self, name: str, outcome: Outcome) -> None:
        """Warn if the traceback of a failed call contains one of the texts in `NEEDS_MAIN`."""
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
    """Return a future's result. Wait in short intervals, because an interrupt is raised only between two waits."""
    while not future.done():
        wait([future], timeout=PIECE)
    return future.result()


def on_this_device(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``work`` for a new thread: set the CUDA device of the calling thread first, then run ``work``."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if used else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return run
