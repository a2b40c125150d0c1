"""Tool calls that were started (`RunningCall`, `Answers`), and the content of the messages with their outcomes."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from ...runtime import registry
from ...usercode.calls import Outcome, awaited_outcome, event_loop, raised_outcome
from ...usercode.untrusted import clean
from .environments import Advise, Environment

PARTS = ("text", "image", "image_url", "audio", "video")  # types of content parts in chat templates


def run_call(future: Future[Outcome], function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Run a call in this thread and set the future. Do nothing if the call has run or was cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    started = time.perf_counter()
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):  # async method of an environment; waiting here keeps the order of its calls
            outcome = asyncio.run_coroutine_threadsafe(awaited_outcome(value, None), event_loop()).result()
        else:
            outcome = Outcome("value", value, time.perf_counter() - started)
    except BaseException as error:  # SystemExit would end the thread and leave the conversation without an outcome
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        outcome = raised_outcome(error)
    future.set_result(outcome)


@dataclass(slots=True)
class RunningCall:
    """A tool call that was started. A main-thread call runs only when its outcome is requested."""

    name: str
    future: Future[Outcome]
    deadline: float = math.inf  # Latest time to wait for the call, in `time.monotonic` seconds.
    run: Callable[[], None] | None = None  # Runs the call in the thread that requests the outcome (main_thread_tools).
    environment: Environment | None = None  # Environment of a method. None for a tool.
    declarable: str | None = None  # Name that could be added to main_thread_tools, or None.

    def done(self) -> bool:
        """Return whether the call has ended, is late, or runs only in the requesting thread."""
        return self.run is not None or self.future.done() or time.monotonic() > self.deadline

    def abandon(self) -> None:
        """Cancel the call. If an environment's thread still runs the call, the environment becomes stuck."""
        if self.environment is not None and self.run is None and not self.future.done():
            self.environment.stuck = True
        self.future.cancel()


@dataclass(slots=True)
class Answers:
    """The pending outcomes of all tool calls in one assistant message."""

    calls: list[RunningCall]
    timeout: float | None
    advise: Advise

    def done(self) -> bool:
        """Return whether no call needs further waiting."""
        return all(call.done() for call in self.calls)

    def outcomes(self) -> list[tuple[str, Outcome]]:
        """Return (tool's name, outcome) for each call, in order. A call that hasn't ended gets the outcome ``late``."""
        outcomes = []
        for call in self.calls:
            if call.run is not None:
                call.run()
            outcome = Outcome("late", None, self.timeout or 0.0)
            if not call.future.done():
                call.abandon()
            else:
                try:
                    outcome = call.future.result()
                except (Exception, CancelledError) as error:  # e.g. an async tool called without a required argument
                    outcome = raised_outcome(error)
            if call.declarable is not None:
                self.advise(call.declarable, outcome)
            outcomes.append((call.name, outcome))
        return outcomes

    def abandon(self) -> None:
        """Cancel all calls, because the conversation won't read their outcomes."""
        for call in self.calls:
            call.abandon()


def answer_content(outcome: Outcome, images: bool = False) -> Any:
    """Return the content of the message with a tool's outcome. ``images``: whether the model reads images.

    A list stays a list, because reward functions get a list in TRL. The model reads the list's `shown_content`. Any
    other value becomes text. Lone surrogates are replaced, because no tokenizer accepts them.

    Raises:
        RuntimeError: the call failed.
        ValueError: the value can't be shown to the model.
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
        return clean(copy.deepcopy(outcome.value))  # A copy, so that the tool can't change the message later.
    except Exception:  # The value can't be copied, e.g. an object with a lock.
        return shown


def shown_content(content: Any, images: bool) -> Any:
    """Return a tool's value for the model: text, or content parts if the value has images and ``images`` is true."""
    if not images or not _is_parts(content) or all(part["type"] != "image" for part in content):
        return text_of(content)
    (in_rgb,) = registry.hooks_of("images", "picture")
    return [
        {"type": "image", "image": in_rgb(part.get("image"), "the tool's answer")}
        if part["type"] == "image"
        else {"type": "text", "text": text_of([part])}
        for part in content
    ]


def characters(content: Any) -> int:
    """Count the characters of the texts in a tool's value. Images count as 0."""
    texts = [part.get("text", "") for part in content] if _is_parts(content) else [content]
    return sum(len(str(text)) for text in texts)


def _is_parts(content: Any) -> bool:
    is_list = isinstance(content, list) and bool(content)
    return is_list and all(isinstance(part, dict) and part.get("type") in PARTS for part in content)


def text_of(content: Any) -> str:
    """Return a tool's value as text. A list of content parts becomes the joined texts of its parts."""
    if not _is_parts(content):
        return str(clean(str(content)))
    if others := [part["type"] for part in content if part["type"] != "text"]:
        raise ValueError(f"A part of type {others[0]!r} can't be shown to the model, which reads only text.")
    return str(clean("".join(str(part["text"]) for part in content)))
