"""`Toolbox`: runs the tools and environment methods that the model calls while it writes a completion.

sync tools                in a worker process if there are workers and the tool can be pickled, else in a thread
async tools               on the event loop of async rewards
an environment's methods  in the environment's thread, in order (async methods on the event loop)
main_thread_tools         in the main thread, between two engine steps: such a call delays all conversations
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from ...data.columns import EMPTY
from ...rollout.texts import ToolCall
from ...runtime import registry
from ...runtime.importing import find_object
from ...usercode.calls import GRACE, Outcome, awaited_outcome, event_loop, place_in, raised_outcome, when_done
from ...usercode.untrusted import clean, own_copy
from ...usercode.worker_pool import WorkerPool
from .environments import Environment, Environments, factory_names, on_this_device

COUNTS = ("tools/calls", "tools/failures", "tools/timeouts", "tools/seconds")
PARTS = ("text", "image", "image_url", "audio", "video")  # Types of a message's content parts.
# Parts of Python's error texts about calls that need the main thread.
NEEDS_MAIN = ("signal only works in main thread", "SQLite objects created in a thread can only be used in that same")


def run_call(future: Future[Outcome], function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Run a call in this thread, and set ``future`` to its outcome."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    started = time.perf_counter()
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):  # E.g. an async method. Waiting keeps an environment's calls in order.
            outcome = asyncio.run_coroutine_threadsafe(awaited_outcome(value, None), event_loop()).result()
        else:
            outcome = Outcome("value", value, time.perf_counter() - started)
    except BaseException as error:  # Also SystemExit, which would end the thread without an outcome.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        outcome = raised_outcome(error)
    future.set_result(outcome)


@dataclass(slots=True)
class RunningCall:
    name: str
    future: Future[Outcome]
    deadline: float = math.inf  # When the wait for the call ends, in `time.monotonic` seconds.
    run: Callable[[], None] | None = None  # Runs the call in the main thread (main_thread_tools).
    environment: Environment | None = None
    declarable: str | None = None  # Name that the warning about a failed call proposes for main_thread_tools.

    def done(self) -> bool:
        return self.run is not None or self.future.done() or time.monotonic() > self.deadline

    def abandon(self) -> None:
        if self.environment is not None and self.run is None and not self.future.done():
            self.environment.stuck = True
        self.future.cancel()


class Toolbox:
    """The tools and environments of a run.

    Args:
        tools: functions or import paths.
        environment_factory: function that makes an environment, or the function's import path. Or a dict {value of a
            dataset row's column ``environment``: function}.
        workers: number of processes for the sync tools. 0 means that sync tools run in threads.
        timeout: maximum seconds of a call outside the main thread. None means no limit.
        main_thread: names of tools and environments that work only in the main thread.
        most_environments: maximum environments lent at once, raised to a group's size if lower. None: no limit.
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any] | str] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | str | None = None, workers: int = 0,
        timeout: float | None = None, main_thread: Sequence[str] | None = None, most_environments: int | None = None,
    ) -> None:  # fmt: skip
        self.timeout = timeout
        self.counts: dict[str, float] = defaultdict(float)
        # Called when a call ends: with the tool's name, and the call's start and end in `time.perf_counter` seconds.
        self.on_call: Callable[[str, float, float], None] | None = None
        self._tools: dict[str, Callable[..., Any]] = {}
        for tool in tools or ():
            function = find_object(tool, "tool", callable) if isinstance(tool, str) else tool
            name = getattr(function, "__name__", None)
            if not callable(function) or not name:
                raise ValueError(f"`tools` has {function!r}, but must list functions or their import paths.")
            if name in self._tools:
                raise ValueError(f"two tools are called {name!r}, but the model needs distinct names: rename one.")
            self._tools[name] = function
        if isinstance(environment_factory, str):
            environment_factory = find_object(environment_factory, "environment_factory", callable)
        self.by_name = isinstance(environment_factory, dict)
        self.factories: dict[str | None, Callable[[], Any]] = {}
        if environment_factory is not None:
            self.factories = dict(environment_factory) if self.by_name else {None: environment_factory}  # type: ignore
        sync = [name for name, function in self._tools.items() if not inspect.iscoroutinefunction(function)]
        able = [*sync, *dict.fromkeys(name for pair in self.factories.items() for name in factory_names(*pair))]
        self._main_thread = {*(main_thread or ())}
        if unable := [name for name in main_thread or () if name not in able]:
            raise ValueError(
                f"`main_thread_tools` has {', '.join(map(repr, unable))}, but must name sync tools and environments of "
                f"this run ({', '.join(able) or 'there are none'}): correct the name, or leave main_thread_tools out."
            )
        self._warned: set[tuple[str, str]] = set()  # (kind of failure, tool) of each warning so far.
        pooled = {name: self._tools[name] for name in sync if name not in self._main_thread}
        self._pool = WorkerPool("tools", pooled, workers, timeout)
        self.notes = self._pool.notes
        main = frozenset(self._main_thread)
        self.environments = Environments(self.factories, main, self._advise_main_thread, most_environments)
        first = self.environments.first
        classes = dict.fromkeys(type(environment.instance) for environment in first.values())
        self.reward_classes = [c for c in classes if callable(getattr(c, "get_reward", None))]
        self.functions = [*self._tools.values()]
        shared = [_schema(name, function) for name, function in self._tools.items()]
        self._schemas: dict[str | None, list[dict[str, Any]]] = {None: shared}
        for key, environment in first.items():
            methods = environment.methods
            if taken := methods.keys() & self._tools.keys():
                of = type(environment.instance).__name__
                raise ValueError(f"tool {taken.pop()!r} is also a method of the environment {of}: rename the tool.")
            self._schemas[key] = shared + [_schema(name, method) for name, method in methods.items()]
            self.functions += methods.values()

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._schemas[self._factory_of(row)]

    def template_arguments(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        if isinstance(row["prompt"], str):
            raise ValueError(
                f"{where}: the prompt is plain text, but tools need a conversation: give a list of messages, such as "
                '[{"role": "user", "content": "..."}].'
            )
        return {"tools": self.schemas(row) or None}

    def open(self, row: dict[str, Any]) -> tuple[Environment | None, list[RunningCall]]:
        """Begin a row's conversation. Return (environment, [``reset`` call]), or (None, []) without environments."""
        if not self.factories:
            return None, []
        environment = self.environments.lend(self._factory_of(row))
        arguments = {name: value for name, value in row.items() if not (self.by_name and name == "environment")}
        if arguments.get("prompt") == EMPTY:
            del arguments["prompt"]
        return environment, [self._start("reset", environment.instance.reset, arguments, environment)]

    def call(self, environment: Environment | None, calls: Sequence[ToolCall]) -> list[RunningCall]:
        self.counts["tools/calls"] += len(calls)
        methods = environment.methods if environment is not None else {}
        running: list[RunningCall] = []
        for call in calls:
            if call.name in self._tools:
                running.append(self._start(call.name, self._tools[call.name], call.arguments))
            elif environment is not None and call.name in methods and not environment.stuck:
                earlier = sum(each.environment is not None for each in running)
                running.append(self._start(call.name, methods[call.name], call.arguments, environment, earlier))
            else:
                missing = f"ValueError: Tool {call.name} not found."
                line = "RuntimeError: The environment is stuck." if call.name in methods else missing
                running.append(RunningCall(call.name, Future()))
                running[-1].future.set_result(Outcome("raised", (line, ""), 0.0))
        if self.on_call is not None:
            for begun in running:
                when_done(begun.future, functools.partial(self.on_call, begun.name))
        return running

    def outcome(self, call: RunningCall) -> Outcome:
        if call.run is not None:
            call.run()
        if not call.future.done():
            call.abandon()
            return Outcome("late", None, self.timeout or 0.0)
        try:
            outcome = call.future.result()
        except (Exception, CancelledError) as error:  # E.g. an async tool's call lacks a required argument.
            outcome = raised_outcome(error)
        if call.declarable is not None:
            self._advise_main_thread(call.declarable, outcome)
        return outcome

    def _start(
        self, name: str, function: Callable[..., Any], arguments: dict[str, Any],
        environment: Environment | None = None, earlier: int = 0,
    ) -> RunningCall:  # fmt: skip
        """Start a call. ``earlier``: number of calls that the environment's thread runs before this call."""
        arguments, is_async = own_copy(arguments), inspect.iscoroutinefunction(function)
        deadline = math.inf if self.timeout is None else time.monotonic() + (1 + earlier) * self.timeout
        if environment is None and name in self._pool:  # No deadline, because worker processes limit the call's time.
            return RunningCall(name, self._pool.submit(name, arguments))
        if environment is None and is_async:

            async def awaited() -> Outcome:
                return await awaited_outcome(function(**arguments), self.timeout)

            running = asyncio.run_coroutine_threadsafe(awaited(), event_loop())
            return RunningCall(name, running, deadline + GRACE)  # The deadline is for tools that block the loop.
        future = Future[Outcome]()
        run = functools.partial(run_call, future, function, arguments)
        if name in self._main_thread if environment is None else environment.thread is None:
            return RunningCall(name, future, run=run, environment=environment)
        if environment is None:
            threading.Thread(target=on_this_device(run), name="colograd-tool", daemon=True).start()
            return RunningCall(name, future, deadline, declarable=name)
        assert environment.thread is not None
        environment.thread.ask(run)
        declarable = None if is_async else environment.name
        return RunningCall(name, future, deadline, environment=environment, declarable=declarable)

    def _advise_main_thread(self, name: str, outcome: Outcome) -> None:
        needs_main = outcome.kind == "raised" and any(part in outcome.value[1] for part in NEEDS_MAIN)
        if not needs_main or ("main thread", name) in self._warned:
            return
        self._warned.add(("main thread", name))
        remedy = f"set main_thread_tools: [{name}]"
        if name in self._tools and name not in self._pool:
            self._main_thread.add(name)
            remedy = f"from now on it runs there (set main_thread_tools: [{name}] to run its first call there too)"
        warnings.warn(
            f"{name} failed outside the main thread. Only the main thread may set a signal handler or use a connection "
            f"that was opened in it: {remedy}. The engine waits for calls in the main thread. With tool_workers a tool "
            "runs in a worker process.",
            stacklevel=3,
        )

    def told(self, calls: Sequence[RunningCall], images: bool = False) -> list[dict[str, Any]]:
        messages = []
        for call in calls:
            outcome = self.outcome(call)
            self.counts["tools/seconds"] += outcome.seconds
            self.counts["tools/timeouts"] += outcome.kind == "late"
            try:
                content = answer_content(outcome, images)
            except Exception as error:
                content = self._failed(call.name, error, outcome)
            messages.append({"role": "tool", "name": call.name, "content": content})
        return messages

    def refused(self, messages: Sequence[dict[str, Any]], error: Exception) -> list[dict[str, Any]]:
        """Return ``messages`` with the text of ``error`` as the content of each message that has images."""
        shown = []
        for message in messages:
            if isinstance(shown_content(message["content"], images=True), list):
                remedy = " The chat template must write images in tools' answers."
                message = {**message, "content": self._failed(message["name"], error, remedy=remedy)}
            shown.append(message)
        return shown

    def _failed(self, name: str, error: Exception, outcome: Outcome | None = None, remedy: str = "") -> str:
        """Return a failed call's answer for the model. Warn the user at most once per tool and kind of failure."""
        self.counts["tools/failures"] += 1
        problem = f"what tool {name!r} returned can't be shown ({error})"
        if outcome is not None and outcome.kind != "value":
            place = place_in(outcome.value[1]) if outcome.kind == "raised" else ""
            problem = place and f"tool {name!r} raised {outcome.value[0]} ({place})"  # Warn only of the tool's errors.
        key = (problem.partition(" ")[0], name)
        if problem and key not in self._warned:
            self._warned.add(key)
            warnings.warn(
                f"{problem}. The model reads the error, now and at later failures. The metric tools/failures counts "
                f"failed calls.{remedy}",
                stacklevel=3,
            )
        return str({"error": str(error)})

    def take_counts(self) -> dict[str, float]:
        return {name: self.counts.pop(name, 0.0) for name in COUNTS}

    def close(self) -> None:
        self.environments.close()
        self._pool.close()

    def _factory_of(self, row: Mapping[str, Any]) -> str | None:
        if not self.by_name:
            return None
        key = row.get("environment")
        if key not in self.factories:
            raise ValueError(
                f"a row's column `environment` is {key!r}, but `environment_factory` has "
                f"{', '.join(map(str, self.factories))}: each row must name one of these environments."
            )
        return key


def environment_reward(of: Any, tools: Toolbox) -> Callable[..., Any]:
    def rewards(environments: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return tools.environments.rewards([e if type(e) is of else None for e in environments])

    async def awaited_rewards(environments: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [await e.get_reward() if type(e) is of else None for e in environments]

    reward: Any = awaited_rewards if inspect.iscoroutinefunction(of.get_reward) else rewards
    reward.__name__ = of.__name__
    return reward


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"tool {name!r} can't be described to the model ({error}): the function needs type hints, and a "
            "Google-style docstring with every argument under `Args:`."
        ) from None


def answer_content(outcome: Outcome, images: bool = False) -> Any:
    """Return the content of a tool's answer. If the call failed, raise an error. The model reads the error's text."""
    if outcome.kind == "late":
        raise RuntimeError(f"timed out after {outcome.seconds:g} s")
    if outcome.kind == "died":
        raise RuntimeError(f"the tool's process ended with status {outcome.value}")
    if outcome.kind != "value":
        raise RuntimeError(str(outcome.value[0]).partition(": ")[2])
    shown = shown_content(outcome.value, images)
    if not isinstance(outcome.value, list):  # A list stays a list for reward functions, as in TRL.
        return shown
    try:
        return clean(copy.deepcopy(outcome.value))  # A copy, because the tool may change its list later.
    except Exception:  # E.g. an object with a lock can't be copied.
        return shown


def shown_content(content: Any, images: bool = False) -> Any:
    """Convert a tool's value to text, or to content parts if it has an image and the model reads images."""
    is_list = isinstance(content, list) and bool(content)
    if not is_list or not all(isinstance(part, dict) and part.get("type") in PARTS for part in content):
        return str(clean(str(content)))
    kinds = [part["type"] for part in content]
    if images and "image" in kinds:
        (in_rgb,) = registry.hooks_of("images", "picture")
        return [
            {"type": "image", "image": in_rgb(part.get("image"), "the tool's answer")}
            if part["type"] == "image"
            else {"type": "text", "text": shown_content([part])}
            for part in content
        ]
    if others := [kind for kind in kinds if kind != "text"]:
        raise ValueError(f"A part of type {others[0]!r} can't be shown to this model.")
    return str(clean("".join(str(part["text"]) for part in content)))
