"""Threads for what tools and environments do: one for a turn's calls, one for each environment."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from .rewards.scoring import contained, event_loop
from .rewards.workers import Outcome

# What Python says in a thread of what the main one alone may do: set a signal handler (as a `signal.alarm` needs), use
# a connection that was opened there.
NEEDS_MAIN = ("signal only works in main thread", "SQLite objects created in a thread can only be used in that same")
PIECE = 0.2  # seconds
Started = tuple[Callable[..., Any], dict[str, Any], "Future[Outcome]"]  # a call, and where its outcome goes


class Lane:
    """The thread of one environment: all that it does happens there, from being made to its reward, for what it holds
    may be bound to the thread that made it (a database connection, a browser). It doesn't keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="colograd-environment", daemon=True).start()

    def start(self, calls: Sequence[Started]) -> None:
        """Run calls one after the other."""
        for call in calls:
            self._work.put(functools.partial(_settle, *call))

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """What a function returns or raises there."""
        future = Future[Any]()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(work)
        return future

    def close(self) -> None:
        """End the thread after what it has to do."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def awaited(future: Future[Any]) -> Any:
    """The result, waited for in pieces: an exception that is to interrupt this thread isn't raised while it sleeps."""
    while not future.done():
        wait([future], timeout=PIECE)
    return future.result()


def needs_main(error: str) -> bool:
    """Whether an error's text says that the main thread is wanted."""
    return any(phrase in error for phrase in NEEDS_MAIN)


def in_thread(calls: Sequence[Started]) -> None:
    """Run calls one after the other in a thread of their own, which doesn't keep the process from ending."""

    def run() -> None:
        for call in calls:
            _settle(*call)

    threading.Thread(target=run, name="colograd-tool", daemon=True).start()


def _settle(function: Callable[..., Any], arguments: dict[str, Any], future: Future[Outcome]) -> None:
    """Run a call, unless nobody waits for it any more."""
    if future.set_running_or_notify_cancel():
        future.set_result(outcome_of(function, arguments))


def outcome_of(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    """What a call returns or raises, here and now."""
    started = time.perf_counter()
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):  # an environment's async method, in its turn
            value = asyncio.run_coroutine_threadsafe(contained(value, None), event_loop()).result()
        return Outcome("value", value, time.perf_counter() - started)
    except BaseException as error:  # SystemExit too: it would end the thread, and the conversation would wait for ever
        return raised(error)


def raised(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    text = "".join(traceback.format_exception(error))
    return Outcome("raised", (f"{type(error).__name__}: {error}", text), 0.0)
