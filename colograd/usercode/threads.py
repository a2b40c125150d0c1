"""Threads for what tools and environments do: one for each call of a tool, one for each environment."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import torch

from .event_loop import contained, event_loop
from .worker_pool import Outcome

# What Python says in a thread of what the main one alone may do: set a signal handler (as a `signal.alarm` needs), use
# a connection that was opened there.
NEEDS_MAIN = ("signal only works in main thread", "SQLite objects created in a thread can only be used in that same")
PIECE = 0.2  # seconds
Started = tuple[Callable[..., Any], dict[str, Any], "Future[Outcome]"]  # a call, and where its outcome goes


class Lane:
    """The thread of one environment: it is made there, and its sync methods run there, for what it holds may be bound
    to the thread that made it (a database connection, a browser). It doesn't keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[int | None, Callable[[], None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="colograd-environment", daemon=True).start()

    def start(self, calls: Sequence[Started]) -> None:
        """Run calls one after the other."""
        for call in calls:
            self._work.put((_cuda_device(), functools.partial(_settle, *call)))

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """What a function returns or raises there."""
        future = Future[Any]()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put((_cuda_device(), work))
        return future

    def close(self) -> None:
        """End the thread after what it has to do."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            device, work = item
            _use(device)
            work()


def _cuda_device() -> int | None:
    """The rank's, which threads don't have by themselves; None before CUDA is used."""
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _use(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def awaited(future: Future[Any]) -> Any:
    """The result, waited for in pieces: an exception that is to interrupt this thread isn't raised while it sleeps."""
    while not future.done():
        wait([future], timeout=PIECE)
    return future.result()


def needs_main(outcome: Outcome) -> bool:
    """Whether a call failed for want of the main thread, by what it raised or what that was raised from."""
    return outcome.kind == "raised" and any(phrase in outcome.value[1] for phrase in NEEDS_MAIN)


def in_thread(calls: Sequence[Started]) -> None:
    """Run calls one after the other in a thread of their own, which doesn't keep the process from ending."""

    device = _cuda_device()

    def run() -> None:
        _use(device)
        for call in calls:
            _settle(*call)

    threading.Thread(target=run, name="colograd-tool", daemon=True).start()


def leave_to_main(calls: Sequence[Started]) -> None:
    """Let calls fail as they would in another thread, so that who asks for their outcomes runs them."""
    for _, _, future in calls:
        future.set_result(raised(ValueError(NEEDS_MAIN[0])))


def say_main(what: str) -> None:
    """Warn that something has found its way to the main thread."""
    warnings.warn(
        f"{what} works in the main thread alone (a signal handler, a connection that was opened there): it runs there "
        "from now on, and the engine waits meanwhile. With tool_workers a tool runs in a process of its own.",
        stacklevel=4,
    )


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
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return raised(error)


def raised(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    text = "".join(traceback.format_exception(error))
    return Outcome("raised", (f"{type(error).__name__}: {error}", text), 0.0)
