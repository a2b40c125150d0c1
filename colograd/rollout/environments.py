"""Environments: made by the user's factories, lent to one conversation at a time, and used again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..rewards.functions import function_name
from ..usercode.calls import raised_outcome
from ..usercode.threads import EnvironmentThread, MainThreadAdvice, wait_for_result

CONTROL = ("reset", "get_reward")  # an environment's methods that aren't tools


@dataclass(slots=True, eq=False)
class Environment:
    """An environment of the user's, and where it lives."""

    instance: Any
    name: str  # that main_thread_tools gives it
    factory: str | None  # which one made it
    thread: EnvironmentThread | None  # None: it needs the main thread
    stuck: bool = False  # a call never came back: its state is unknown

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """Its tools: the public methods. Looked up on the class, so that no property is evaluated.

        Raises:
            ValueError: it has no `reset`.
        """
        names = [name for name, _ in inspect.getmembers(type(self.instance), predicate=inspect.isfunction)]
        if "reset" not in names:
            raise ValueError(
                f"environment_factory makes a {type(self.instance).__name__}, which has no method `reset`: define one, "
                "which begins an episode from the row's columns and returns None or a text that ends the prompt."
            )
        tools = [name for name in names if name not in CONTROL and not name.startswith("_")]
        return {name: getattr(self.instance, name) for name in tools}


def factory_names(key: str | None, factory: Callable[[], Any]) -> list[str]:
    """What main_thread_tools may call an environment: its key, where there are several, and its factory's name."""
    own = function_name(factory)
    return [own] if key is None else [key, own]


class Environments:
    """Makes environments, lends them, and takes them back.

    Args:
        factories: by the name in a row's column `environment`; by None where there is only one.
        main_thread: see `Toolbox`.
    """

    def __init__(
        self, factories: Mapping[Any, Callable[[], Any]], main_thread: Collection[str], advice: MainThreadAdvice
    ) -> None:
        self._factories, self._main_thread, self._advice = factories, main_thread, advice
        self._known: dict[int, Environment] = {}  # by the id of the instance
        self._lent: list[Environment] = []
        self.latest: list[Any] | None = None  # instances of the present round's conversations, or of the last one's
        self.first = {key: self._make(key) for key in factories}  # one of each kind, to be described
        self._free = {key: [environment] for key, environment in self.first.items()}

    def lend(self, key: str | None) -> Environment:
        """An environment for one conversation, until `take_back`."""
        free = self._free[key]
        environment = free.pop() if free else self._make(key)
        latest = self.latest if self._lent and self.latest is not None else []
        self._lent.append(environment)
        self.latest = latest
        latest.append(environment.instance)
        return environment

    def take_back(self) -> None:
        """Make all that are lent free again: their conversations are over and scored. Stuck ones are left to
        themselves."""
        for environment in self._lent:
            if not environment.stuck:
                self._free[environment.factory].append(environment)
                continue
            self._known.pop(id(environment.instance), None)
            if environment.thread is not None:
                environment.thread.close()
        self._lent = []

    def rewards(self, instances: Sequence[Any]) -> list[Any]:
        """What the ``get_reward`` of each returns; None for None. One that never comes back leaves its environment
        stuck."""
        environments = [self._known.get(id(instance)) for instance in instances]
        asked: list[Future[Any] | None] = [
            None if known is None or known.thread is None else known.thread.ask(known.instance.get_reward)
            for known in environments
        ]
        try:
            return [
                None if instance is None else instance.get_reward() if future is None else wait_for_result(future)
                for instance, future in zip(instances, asked, strict=True)
            ]
        except BaseException as error:
            for known, future in zip(environments, asked, strict=True):
                if known is not None and future is not None:
                    known.stuck |= not future.done()
                    if future.done() and future.exception() is error:
                        self._advice.give(known.name, raised_outcome(error))
            raise

    def close(self) -> None:
        """End the environments' threads."""
        for environment in self._known.values():
            if environment.thread is not None:
                environment.thread.close()

    def _make(self, key: str | None) -> Environment:
        factory = self._factories[key]
        name, *others = factory_names(key, factory)
        if not {name, *others}.isdisjoint(self._main_thread):
            instance, thread = factory(), None
        else:
            thread = EnvironmentThread()
            try:
                instance = thread.ask(factory).result()
            except BaseException as error:
                thread.close()
                self._advice.give(name, raised_outcome(error))
                raise
        environment = self._known.setdefault(id(instance), Environment(instance, name, key, thread))
        if thread is not None and environment.thread is not thread:  # a factory that gives the same one again
            thread.close()
        return environment
