"""Runs the calls of tools, and brings back what they returned.

    sync tools                in a worker process, where there are workers and the tool can travel; else in a thread
    async tools               on the event loop that async rewards have, all conversations together
    an environment's methods  in the environment's own thread, one conversation's calls in their order (the async ones
                              on the event loop)
    what is declared to need  in the thread that asks for the outcome: the main one, between two engine steps
    the main thread

A conversation's slow tool stalls nobody else. A late call is answered with an error, which the model sees.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from ..data.images import in_rgb
from ..usercode.calls import GRACE, Outcome, awaited_outcome, event_loop, raised_outcome
from ..usercode.copies import own_copy
from ..usercode.threads import MainThreadAdvice, UserCall
from ..usercode.untrusted import clean
from ..usercode.worker_pool import WorkerPool
from .environments import Environment
from .tool_format import ToolCall

PARTS = ("text", "image", "image_url", "audio", "video")  # of a message's content, as chat templates know them


@dataclass(slots=True)
class RunningCall:
    """A call that has begun, or that the thread which asks for its outcome runs."""

    name: str
    future: Future[Outcome]
    deadline: float = math.inf  # of `time.monotonic`: nobody waits longer
    asker_runs: UserCall | None = None  # where it is declared to need the main thread
    environment: Environment | None = None  # whose method it is
    declarable: str | None = None  # the name by which it can be declared so, where it isn't

    @classmethod
    def failed(cls, name: str, line: str) -> RunningCall:
        """A call that never begins, and why."""
        future = Future[Outcome]()
        future.set_result(Outcome("raised", (line, ""), 0.0))
        return cls(name, future)

    def done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.asker_runs is not None or self.future.done() or time.monotonic() > self.deadline

    def outcome(self, timeout: float | None) -> Outcome:
        """How it ended; ``late``, after ``timeout``, where it hasn't."""
        if self.asker_runs is not None:
            self.asker_runs.run()
        if not self.future.done():
            self.abandon()
            return Outcome("late", None, timeout or 0.0)
        try:
            return self.future.result()
        except (Exception, CancelledError) as error:  # an async tool without its arguments, say
            return raised_outcome(error)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        if self.environment is not None and self.asker_runs is None and not self.future.done():
            self.environment.stuck = True
        self.future.cancel()


@dataclass(slots=True)
class Answers:
    """The outcomes of a turn's calls, on their way."""

    calls: list[RunningCall]
    timeout: float | None
    advice: MainThreadAdvice

    def done(self) -> bool:
        """Whether `outcomes` has all it will get, without waiting."""
        return all(call.done() for call in self.calls)

    def outcomes(self) -> list[tuple[str, Outcome]]:
        """Each call's name and outcome, in the order of the calls; ``late`` for one that isn't back."""
        found = []
        for call in self.calls:
            outcome = call.outcome(self.timeout)
            if call.declarable is not None:
                self.advice.give(call.declarable, outcome)
            found.append((call.name, outcome))
        return found

    def abandon(self) -> None:
        """Nobody waits for them any more."""
        for call in self.calls:
            call.abandon()


class ToolRunner:
    """Starts each call where its tool belongs. See `Toolbox` for the arguments."""

    def __init__(
        self, tools: Mapping[str, Callable[..., Any]], main_thread: Collection[str], workers: int, timeout: float | None
    ) -> None:
        self._tools, self._main_thread, self._timeout = tools, {*main_thread}, timeout
        able = {name: f for name, f in tools.items() if not inspect.iscoroutinefunction(f) and name not in main_thread}
        self.pool = WorkerPool("tools", able, workers, timeout)

    def start(self, call: ToolCall) -> RunningCall:
        """Begin to run a tool."""
        name, function, arguments = call.name, self._tools[call.name], own_copy(call.arguments)
        if name in self.pool:  # which says itself what is late
            return RunningCall(name, self.pool.submit(name, arguments))
        if inspect.iscoroutinefunction(function):
            running = asyncio.run_coroutine_threadsafe(self._await(function, arguments), event_loop())
            return RunningCall(name, running, self._deadline() + GRACE)  # it ends in time, unless it blocks the loop
        user_call = UserCall(function, arguments)
        if name in self._main_thread:
            return RunningCall(name, user_call.future, asker_runs=user_call)
        user_call.start_thread()
        return RunningCall(name, user_call.future, self._deadline(), declarable=name)

    def move_to_main_thread(self, name: str) -> bool:
        """Run a tool's later calls in the main thread; False: it is no tool that runs in a thread."""
        moves = name in self._tools and name not in self.pool
        if moves:
            self._main_thread.add(name)
        return moves

    def start_method(
        self, environment: Environment, name: str, arguments: dict[str, Any], earlier: int = 0
    ) -> RunningCall:
        """Begin to run an environment's method, behind ``earlier`` others of the same turn."""
        user_call = UserCall(getattr(environment.instance, name), own_copy(arguments))
        if environment.thread is None:
            return RunningCall(name, user_call.future, asker_runs=user_call, environment=environment)
        environment.thread.ask(user_call.run)
        deadline = self._deadline(1 + earlier)
        declarable = None if inspect.iscoroutinefunction(user_call.function) else environment.name
        return RunningCall(name, user_call.future, deadline, environment=environment, declarable=declarable)

    def _deadline(self, calls: int = 1) -> float:
        """When the last of some calls that run one after the other is late."""
        return math.inf if self._timeout is None else time.monotonic() + calls * self._timeout

    async def _await(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
        return await awaited_outcome(function(**arguments), self._timeout)


def answer_content(outcome: Outcome, images: bool = False) -> Any:
    """The content of a tool's message. A list stays a list, as in TRL, for the reward functions, and the model is shown
    its `shown_content`; anything else becomes text here. Lone surrogates, which no tokenizer takes, are replaced.

    Args:
        images: the model reads them.

    Raises:
        RuntimeError, ValueError: the call failed, or what it returned can't be shown.
    """
    if outcome.kind == "late":
        raise RuntimeError(f"timed out after {outcome.seconds:g} s")
    if outcome.kind == "died":
        raise RuntimeError(f"the tool's process ended with status {outcome.value}")
    if outcome.kind != "value":
        raise RuntimeError(str(outcome.value[0]).partition(": ")[2])
    shown = shown_content(outcome.value, images)
    if not isinstance(outcome.value, list):
        return shown
    try:
        return clean(copy.deepcopy(outcome.value))  # so that nobody changes it behind the message's back
    except Exception:  # whatever holds a lock or a connection
        return shown


def shown_content(content: Any, images: bool) -> Any:
    """What a tool returned, as the model is shown it: as text, or as parts where some are images.

    Raises:
        ValueError: a part of another kind, or an image that can't be read.
    """
    if not images or not _has_images(content):
        return text_of(content)
    return [
        {"type": "image", "image": in_rgb(part.get("image"), "the tool's answer")}
        if part["type"] == "image"
        else {"type": "text", "text": text_of([part])}
        for part in content
    ]


def _has_images(content: Any) -> bool:
    return _is_parts(content) and any(part["type"] == "image" for part in content)


def _is_parts(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(part, dict) and part.get("type") in PARTS for part in content)
    )


def text_of(content: Any) -> str:
    """What a tool returned, as text; of a list of content parts the texts.

    Raises:
        ValueError: a part that isn't text.
    """
    if not _is_parts(content):
        return str(clean(str(content)))
    for part in content:
        if part["type"] != "text":
            raise ValueError(f"A part of type {part['type']!r} can't be shown, only text.")
    return str(clean("".join(str(part["text"]) for part in content)))
