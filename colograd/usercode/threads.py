"""Threads for what tools and environments do: one for each call of a tool, one for each environment.

They are daemons: none keeps the process from ending.
"""

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

from .calls import Outcome, awaited_outcome, event_loop, raised_outcome

# What Python says in a thread of what the main one alone may do: set a signal handler (as a `signal.alarm` needs), use
# a connection that was opened there.
NEEDS_MAIN = ("signal only works in main thread", "SQLite objects created in a thread can only be used in that same")
PIECE = 0.2  # seconds


@dataclass(frozen=True, slots=True)
class UserCall:
    """A call of the user's code, and the future that gets its outcome."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    future: Future[Outcome] = field(default_factory=Future)

    def run(self) -> None:
        """Run it in this thread, unless it has run already or nobody waits for it any more."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result(self._outcome())

    def start_thread(self) -> None:
        """Run it in a thread of its own."""
        threading.Thread(target=_on_this_device(self.run), name="colograd-tool", daemon=True).start()

    def _outcome(self) -> Outcome:
        started = time.perf_counter()
        try:
            value = self.function(**self.arguments)
            if inspect.isawaitable(value):  # an environment's async method, in its turn
                return asyncio.run_coroutine_threadsafe(awaited_outcome(value, None), event_loop()).result()
            return Outcome("value", value, time.perf_counter() - started)
        except BaseException as error:  # SystemExit too: it would end the thread, and the conversation wait for ever
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            return raised_outcome(error)


class EnvironmentThread:
    """The thread of one environment: it is made there, and its sync methods run there, for what it holds may be bound
    to the thread that made it (a database connection, a browser).
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="colograd-environment", daemon=True).start()

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """What a function returns or raises there, behind all that was asked before."""
        future = Future[Any]()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(_on_this_device(work))
        return future

    def close(self) -> None:
        """End the thread after what it has to do."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class MainThreadAdvice:
    """Says, once per name, that a call failed because it needs the main thread, and moves its tool there if it can."""

    def __init__(self) -> None:
        self._advised: set[str] = set()
        # Runs a tool's later calls in the main thread; False: it can't (an environment's methods stay in its thread).
        self.move: Callable[[str], bool] = lambda name: False

    def give(self, name: str, outcome: Outcome) -> None:
        """Warn if the error, or one that it was raised from, has one of `NEEDS_MAIN` in its text."""
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
    """The result, waited for in pieces: an exception that is to interrupt this thread isn't raised while it sleeps."""
    while not future.done():
        wait([future], timeout=PIECE)
    return future.result()


def _on_this_device(work: Callable[[], None]) -> Callable[[], None]:
    """The work, for another thread, on the CUDA device of this one: threads don't have the rank's by themselves."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if used else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return run
