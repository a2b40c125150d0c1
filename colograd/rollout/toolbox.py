"""Tools and environments: what a model may call while it writes, and who runs it.

    sync tools                in a worker process, where there are workers and the tool can travel; else in a thread
    async tools               on the event loop that async rewards have, all conversations together
    an environment's methods  in the environment's own thread, one conversation's calls in their order (the async ones
                              on the event loop)

What fails for want of the main thread runs there from then on: a tool, or all new environments of a factory.
A conversation's slow tool stalls nobody else. A late call is answered with an error, which the model sees.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from ..runtime.importing import find_object
from ..usercode.event_loop import GRACE, Late, contained, event_loop
from ..usercode.threads import (
    Lane,
    Started,
    awaited,
    in_thread,
    leave_to_main,
    needs_main,
    outcome_of,
    raised,
    say_main,
)
from ..usercode.worker_pool import Call, CannotTravel, Outcome, Worker, WorkerPool, travelling
from .tool_format import ToolCall

CONTROL = ("reset", "get_reward")  # an environment's methods that aren't tools
COUNTS = ("tools/calls", "tools/failures", "tools/timeouts", "tools/seconds")
PARTS = ("text", "image", "image_url", "audio", "video")  # of a message's content, as chat templates know them
EMPTY = [{"role": "user", "content": ""}]  # the prompt of rows without one: what `reset` returns is all of it


@dataclass(slots=True)
class Session:
    """One conversation's tools."""

    schemas: list[dict[str, Any]]  # as chat templates take them
    functions: dict[str, Callable[..., Any]]
    environment: Any = None
    environment_name: str | None = None
    stuck: bool = False  # a call of the environment never came back: its state is unknown


@dataclass(slots=True)
class Running:
    """One call that has begun."""

    name: str
    future: Future[Outcome]
    deadline: float  # of `time.monotonic`: when it is given up by who waits for it
    of_environment: bool  # whether the conversation's environment runs it
    again: Callable[[], Outcome] | None = None  # in the thread that asks, where it failed for want of the main one

    def outcome(self) -> Outcome | None:
        """How it ended; None where it hasn't."""
        if not self.future.done():
            return None
        try:
            outcome = self.future.result()
            return self.again() if self.again is not None and needs_main(outcome) else outcome
        except (Exception, CancelledError) as error:  # a worker that can't be started, an answer that can't be read
            return raised(error)


@dataclass(slots=True)
class Answers:
    """The outcomes of a turn's calls, on their way."""

    calls: list[Running]
    session: Session
    timeout: float | None

    def done(self) -> bool:
        """Whether `outcomes` has all it will get."""
        return all(call.future.done() or time.monotonic() > call.deadline for call in self.calls)

    def outcomes(self) -> list[tuple[str, Outcome]]:
        """Each call's name and outcome, in the order of the calls; ``late`` for one that isn't back."""
        found = []
        for call in self.calls:
            outcome = call.outcome()
            if outcome is None:
                self.session.stuck |= call.of_environment
                outcome = Outcome("late", None, self.timeout or 0.0)
            found.append((call.name, outcome))
        return found

    def abandon(self) -> None:
        """Nobody waits for them any more."""
        for call in self.calls:
            if call.future.done():
                continue
            self.session.stuck |= call.of_environment
            call.future.drop() if isinstance(call.future, Call) else call.future.cancel()


class Toolbox:
    """The tools of a run, and its environments.

    Args:
        tools: functions or import paths, sync or async, with type hints and a Google-style docstring.
        environment_factory: makes an environment, whose ``reset`` begins an episode and whose other public methods are
            tools; or several by name, of which a row's column ``environment`` picks one.
        workers: processes for the sync tools; 0: they run in threads.
        timeout: seconds that a call may take; None: any.

    Raises:
        ValueError: a tool that isn't one, two with one name, or an environment without ``reset``.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | str | None = None,
        workers: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.timeout = timeout
        self.counts: dict[str, float] = defaultdict(float)  # metrics since `take_counts`
        self.notes: list[str] = []
        self._tools = _named([find_object(t, "tool", callable) if isinstance(t, str) else t for t in tools or ()])
        if isinstance(environment_factory, str):
            environment_factory = find_object(environment_factory, "environment_factory", callable)
        self.by_name = isinstance(environment_factory, dict)
        self._factories: dict[str | None, Callable[[], Any]] = {}
        if environment_factory is not None:
            self._factories = dict(environment_factory) if self.by_name else {None: environment_factory}  # type: ignore
        self._lanes: dict[int, Lane] = {}  # of the environments that have one, by their id
        self._factories_on_main: set[str | None] = set()  # of environments that fail in another thread
        self._free: dict[str | None, list[Any]] = {name: [self._made(name)] for name in self._factories}
        self._lent: list[Session] = []
        classes = dict.fromkeys(type(environment) for (environment,) in self._free.values())
        self.reward_classes = [c for c in classes if callable(getattr(c, "get_reward", None))]  # reward themselves
        shared = [_schema(name, function) for name, function in self._tools.items()]
        self._schemas: dict[str | None, list[dict[str, Any]]] = {None: shared}
        for name, (environment,) in self._free.items():
            methods = _methods(environment)
            taken = set(methods) & set(self._tools)
            if taken:
                raise ValueError(f"tool {taken.pop()!r} is a method of {_class(environment)} too: rename one of them.")
            self._schemas[name] = shared + [_schema(key, method) for key, method in methods.items()]
        self._tools_on_main: set[str] = set()  # names of those that fail in another thread
        self._numbers: dict[str, int] = {}  # of the tools that run in workers
        self._pool: WorkerPool | None = None
        if workers:
            self._open(workers)

    @property
    def has_environments(self) -> bool:
        return bool(self._factories)

    def schemas(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The tools that a row's conversation shows the model.

        Raises:
            ValueError: the row names an environment that there isn't.
        """
        return self._schemas[self._name(row)]

    def open(self, row: dict[str, Any]) -> tuple[Session, Answers | None]:
        """A conversation's tools, and the answer of its environment's ``reset(**row)`` on its way."""
        name = self._name(row)
        session = Session(self._schemas[name], dict(self._tools))
        if name not in self._factories:
            return session, None
        free = self._free[name]
        session.environment = free.pop() if free else self._made(name)
        session.environment_name = name
        session.functions |= _methods(session.environment)
        self._lent.append(session)
        arguments = {key: value for key, value in row.items() if not (self.by_name and key == "environment")}
        if arguments.get("prompt") == EMPTY:
            del arguments["prompt"]
        future, limit = Future[Outcome](), float("inf") if self.timeout is None else time.monotonic() + self.timeout
        reset = session.environment.reset
        self._start(session, [(reset, arguments, future)])
        again = self._again(session, reset, arguments)
        return session, Answers([Running("reset", future, limit, True, again)], session, self.timeout)

    def call(self, session: Session, calls: Sequence[ToolCall]) -> Answers:
        """Begin to run a turn's calls."""
        running = []
        of_environment = []
        for call in calls:
            self.counts["tools/calls"] += 1
            function, future, again = session.functions.get(call.name), Future[Outcome](), None
            limit = float("inf") if self.timeout is None else time.monotonic() + self.timeout
            here = call.name not in self._tools  # of the environment
            if function is None:
                future.set_result(Outcome("raised", (f"ValueError: Tool {call.name} not found.", ""), 0.0))
            elif here and session.stuck:
                future.set_result(Outcome("raised", ("RuntimeError: The environment is stuck.", ""), 0.0))
            elif here:
                of_environment.append((function, call.arguments, future))
                again = self._again(session, function, call.arguments)
                limit += (len(of_environment) - 1) * (self.timeout or 0.0)  # one after the other
            elif call.name in self._numbers:
                assert self._pool is not None
                future, limit = self._pool.submit(self._numbers[call.name], call.arguments, None), float("inf")
            elif inspect.iscoroutinefunction(function):
                future = asyncio.run_coroutine_threadsafe(
                    _awaited(function, call.arguments, self.timeout), event_loop()
                )
                limit += GRACE  # it ends itself in time, unless it blocks the loop
            else:
                started = [(function, call.arguments, future)]
                leave_to_main(started) if call.name in self._tools_on_main else in_thread(started)
                again = self._tool_again(call.name, call.arguments)
            running.append(Running(call.name, future, limit, here and function is not None, again))
        if of_environment:
            self._start(session, of_environment)
        return Answers(running, session, self.timeout)

    def told(self, answers: Answers) -> list[dict[str, Any]]:
        """The messages that tell the model what its calls returned. A list stays one, as in TRL, for the reward
        functions; the model is shown its text (`text_of`)."""
        messages = []
        for name, outcome in answers.outcomes():
            self.counts["tools/seconds"] += outcome.seconds
            self.counts["tools/timeouts"] += outcome.kind == "late"
            try:
                content: Any = _shown(outcome)
                if outcome.kind == "value" and isinstance(outcome.value, list):
                    content = _copied(outcome.value, content)
            except Exception as error:
                self.counts["tools/failures"] += 1
                content = str({"error": str(error)})
            messages.append({"role": "tool", "name": name, "content": content})
        return messages

    def release(self) -> None:
        """Take back the environments of conversations that are over and scored. Stuck ones are left to themselves, and
        those of a factory that wants the main thread make room for some that are made there."""
        for session in self._lent:
            environment, name = session.environment, session.environment_name
            if session.stuck or (name in self._factories_on_main and id(environment) in self._lanes):
                if (lane := self._lanes.pop(id(environment), None)) is not None:
                    lane.close()
            else:
                self._free[name].append(environment)
        self._lent = []

    def own_rewards(self, environments: Sequence[Any]) -> list[Any]:
        """What the ``get_reward`` of each returns; None for None. One that never comes back leaves its environment
        stuck."""
        lanes = [None if e is None else self._lanes.get(id(e)) for e in environments]
        asked = [None if lane is None else lane.ask(e.get_reward) for e, lane in zip(environments, lanes, strict=True)]
        try:
            return [
                None if e is None else e.get_reward() if future is None else self._own_reward(e, future)
                for e, future in zip(environments, asked, strict=True)
            ]
        except BaseException:
            late = {id(e) for e, future in zip(environments, asked, strict=True) if future and not future.done()}
            for session in self._lent:
                session.stuck |= id(session.environment) in late
            raise

    def _own_reward(self, environment: Any, future: Future[Any]) -> Any:
        try:
            return awaited(future)
        except Exception as error:
            if not future.done() or not needs_main(raised(error)):
                raise
        for session in self._lent:
            if session.environment is environment:
                self._to_main(_class(environment), session.environment_name)
        return environment.get_reward()

    def take_counts(self) -> dict[str, float]:
        """Sums since the last call: ``tools/calls``, ``/failures``, ``/timeouts`` and ``/seconds``."""
        taken = dict.fromkeys(COUNTS, 0.0) | self.counts
        self.counts.clear()
        return taken

    def close(self) -> None:
        """End the workers and the environments' threads."""
        for lane in self._lanes.values():
            lane.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _made(self, name: str | None) -> Any:
        """A new environment, made in its own thread; without one where the main thread is wanted."""
        make = self._factories[name]
        if name in self._factories_on_main:
            return make()
        lane = Lane()
        try:
            environment = lane.ask(make).result()
        except BaseException as error:
            lane.close()
            if not needs_main(raised(error)):
                raise
            self._to_main(getattr(make, "__name__", type(make).__name__), name)
            return make()
        if self._lanes.setdefault(id(environment), lane) is not lane:  # a factory that gives the same one again
            lane.close()
        return environment

    def _start(self, session: Session, calls: Sequence[Started]) -> None:
        """Run an environment's calls one after the other: in its thread, or where their outcomes are asked for."""
        lane = self._lanes.get(id(session.environment))
        if lane is not None and session.environment_name not in self._factories_on_main:
            lane.start(calls)
        else:
            leave_to_main(calls)

    def _again(
        self, session: Session, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> Callable[[], Outcome] | None:
        """An environment's call once more, where its outcome is asked for: in the main thread. Its connections stay
        with its thread: the next environments are made in the main one, and what it has begun goes on in both, in
        order. None for an async one, which has the event loop."""
        lane, waits = self._lanes.get(id(session.environment)), session.environment_name in self._factories_on_main
        if inspect.iscoroutinefunction(function) and not waits:
            return None

        def again() -> Outcome:
            if lane is not None and waits:
                outcome: Outcome = awaited(lane.ask(lambda: outcome_of(function, arguments)))
                if not needs_main(outcome):
                    return outcome
            if lane is not None:
                self._to_main(_class(session.environment), session.environment_name)
            return outcome_of(function, arguments)

        return again

    def _to_main(self, what: str, factory: str | None) -> None:
        """Make the next environments of a factory in the main thread."""
        if factory not in self._factories_on_main:
            self._factories_on_main.add(factory)
            say_main(what)

    def _tool_again(self, name: str, arguments: dict[str, Any]) -> Callable[[], Outcome]:
        """A tool's call once more, in the main thread, where its outcome is asked for; there it stays."""

        def again() -> Outcome:
            if name not in self._tools_on_main:
                self._tools_on_main.add(name)
                say_main(name)
            return outcome_of(self._tools[name], arguments)

        return again

    def _name(self, row: dict[str, Any]) -> str | None:
        if not self.by_name:
            return None
        name = row.get("environment")
        if name not in self._factories:
            raise ValueError(
                f"a row's column `environment` is {name!r}, but environment_factory has "
                f"{', '.join(map(str, self._factories))}: name one of these in each row."
            )
        return name

    def _open(self, workers: int) -> None:
        able: dict[str, bytes] = {}
        for name, function in self._tools.items():
            if inspect.iscoroutinefunction(function):
                continue
            try:
                able[name] = travelling(function)
                Worker([able[name]]).probe()
            except CannotTravel as reason:
                able.pop(name, None)
                self.notes.append(f"tools: {name} runs in the trainer's process ({reason})")
        if able:
            self._pool = WorkerPool(list(able.values()), workers, self.timeout)
            self._numbers = {name: number for number, name in enumerate(able)}
            self.notes.insert(0, f"tools: {', '.join(able)} in {workers} worker process(es)")


def environment_reward(of: Any, tools: Toolbox) -> Callable[..., Any]:
    """The reward that environments of the class ``of`` give themselves: None for conversations without one."""

    def own(environments: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return tools.own_rewards([e if type(e) is of else None for e in environments])

    async def own_awaited(environments: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [await e.get_reward() if type(e) is of else None for e in environments]

    reward: Any = own_awaited if inspect.iscoroutinefunction(of.get_reward) else own
    reward.__name__ = of.__name__
    return reward


def text_of(content: Any) -> str:
    """What a tool returned, as text; of a list of content parts the texts.

    Raises:
        ValueError: a part that isn't text.
    """
    parts: list[Any] = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) and part.get("type") in PARTS for part in parts):
        return str(content)
    for part in parts:
        if part["type"] != "text":
            raise ValueError(f"A part of type {part['type']!r} can't be shown, only text.")
    return "".join(str(part["text"]) for part in parts)


def _shown(outcome: Outcome) -> str:
    """What the model is told.

    Raises:
        RuntimeError, ValueError: the call failed, or what it returned isn't text.
    """
    if outcome.kind == "value":
        return text_of(outcome.value)
    if outcome.kind == "late":
        raise RuntimeError(f"timed out after {outcome.seconds:g} s")
    if outcome.kind == "died":
        raise RuntimeError(f"the tool's process ended with status {outcome.value}")
    raise RuntimeError(str(outcome.value[0]).partition(": ")[2])


def _copied(value: Any, instead: str) -> Any:
    """A copy, so that nobody changes it behind a message's back; of what can't be copied the text ``instead``."""
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever holds a lock or a connection
        return instead


async def _awaited(function: Callable[..., Any], arguments: dict[str, Any], timeout: float | None) -> Outcome:
    started = time.perf_counter()
    try:
        value = await contained(function(**arguments), timeout)
    except Late:
        return Outcome("late", None, timeout or 0.0)
    except Exception as error:
        return raised(error)
    return Outcome("value", value, time.perf_counter() - started)


def _named(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for function in functions:
        if not callable(function) or not getattr(function, "__name__", None):
            raise ValueError(
                f"tools holds {function!r}, but a tool must be a function: give functions or import paths."
            )
        if function.__name__ in found:
            raise ValueError(f"two tools are called {function.__name__!r}, by which the model calls them: rename one.")
        found[function.__name__] = function
    return found


def _methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """An environment's tools: its public methods. Looked up on the class, so that no property is evaluated."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    if "reset" not in names:
        raise ValueError(
            f"environment_factory makes a {_class(environment)}, which has no method `reset`: define one, which begins "
            "an episode from the row's columns and returns None or a text that ends the prompt."
        )
    return {name: getattr(environment, name) for name in names if name not in CONTROL and not name.startswith("_")}


def _class(environment: Any) -> str:
    return type(environment).__name__


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(function)
        return schema
    except Exception as error:  # transformers has several kinds for several omissions
        raise ValueError(
            f"tool {name!r} can't be described to the model ({error}): give it type hints and a Google-style "
            "docstring with every argument under `Args:`."
        ) from None
