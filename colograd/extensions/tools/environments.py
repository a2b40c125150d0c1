"""`Environments`: makes environments with the user's factories, and lends each to one conversation at a time."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from ...batch import Group
from ...rewards import Scoring
from ...rewards.functions import ModelReward, function_name
from ...rollout.stages import BeginScore, PendingRewards, Stages
from ...usercode.calls import Outcome, place_in, raised_outcome
from ...usercode.worker_pool import WorkerCall

Advise = Callable[[str, Outcome], None]  # Warns if the outcome shows that the named environment needs the main thread.
PIECE = 0.2  # Maximum seconds of one wait for a reward. `reward_timeout` can interrupt only between two waits.
CONTROL = ("reset", "get_reward")  # Public methods of an environment that the model can't call.


def on_this_device(work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs ``work`` in another thread, on the CUDA device that the calling thread uses now."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if used else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return run


class EnvironmentThread:
    """A thread for one environment. A database connection or browser may work only in the thread that opened it.
    The thread is a daemon, so that a stuck method can't hold up the end of the process."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

        def run() -> None:
            while (work := self._work.get()) is not None:
                work()

        threading.Thread(target=run, name="colograd-environment", daemon=True).start()

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        future = Future[Any]()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(on_this_device(work))
        return future

    def close(self) -> None:
        self._work.put(None)


@dataclass(slots=True, eq=False)
class Environment:
    instance: Any
    name: str  # Name for main_thread_tools: the factory's key, or its function's name if it has none.
    factory: str | None
    thread: EnvironmentThread | None  # None: its calls run in the main thread.
    stuck: bool = False  # Whether a call didn't return in time, so that the environment's state is unknown.

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods that the model may call, by name. Names are read from the class, so that no property runs."""
        names = [name for name, _ in inspect.getmembers(type(self.instance), predicate=inspect.isfunction)]
        if "reset" not in names:
            raise ValueError(
                f"environment_factory makes a {type(self.instance).__name__}, which has no method `reset`: define it. "
                "`reset` begins an episode from the row's columns, and returns None or a text to append to the prompt."
            )
        tools = [name for name in names if name not in CONTROL and not name.startswith("_")]
        return {name: getattr(self.instance, name) for name in tools}


def factory_names(key: str | None, factory: Callable[[], Any]) -> list[str]:
    name = function_name(factory)
    return [name] if key is None else [key, name]


class Environments:
    """Makes environments, and lends each to one conversation at a time, until the conversation has been scored.

    A factory's key is the name in a row's column `environment`. Without a dict of factories the key is None."""

    def __init__(
        self, factories: Mapping[Any, Callable[[], Any]], main_thread: Collection[str], advise: Advise,
        limit: int | None,
    ) -> None:  # fmt: skip
        self._factories, self._main_thread, self._advise, self._limit = factories, main_thread, advise, limit
        self._known: dict[int, Environment] = {}  # Environments by `id(instance)`.
        self._lent: list[Environment] = []
        self._returning = threading.Lock()  # Guards `_lent`, because async reward functions end in other threads.
        self.in_scoring: set[int] = set()  # Positions of the groups that are being scored.
        self._begins = True  # Whether no environment has been lent in this generation.
        self.latest: list[Any] | None = None  # Instances lent in the current or last generation.
        self.first = {key: self._make(key) for key in factories}  # One environment per factory, to describe its tools.
        self._free = {key: [environment] for key, environment in self.first.items()}

    def lend(self, key: str | None) -> Environment:
        free = self._free[key]
        environment = free.pop() if free else self._make(key)
        self._lent.append(environment)
        if self._begins or self.latest is None:
            self._begins, self.latest = False, []
        self.latest.append(environment.instance)
        return environment

    def has_room(self, group: int) -> bool:
        """Return whether fewer than max(limit, group size) environments are lent and not stuck, or limit is None."""
        return self._limit is None or sum(not each.stuck for each in self._lent) < max(self._limit, group)

    def end_scoring(self, groups: Sequence[Group]) -> None:
        scored = {id(rollout.columns.get("environments")) for group in groups for rollout in group.rollouts}
        with self._returning:
            for environment in [each for each in self._lent if id(each.instance) in scored]:
                self._lent.remove(environment)
                self._take_back(environment)
            self.in_scoring -= {group.position for group in groups}

    def take_back(self) -> None:
        """End all loans, because a new generation begins. Stuck environments aren't lent again."""
        with self._returning:
            for environment in self._lent:
                self._take_back(environment)
            self._lent, self.in_scoring, self._begins = [], set(), True

    def _take_back(self, environment: Environment) -> None:
        if not environment.stuck:
            self._free[environment.factory].append(environment)
            return
        self._known.pop(id(environment.instance), None)
        if environment.thread is not None:
            environment.thread.close()

    def rewards(self, instances: Sequence[Any]) -> list[Any]:
        environments = [self._known.get(id(instance)) for instance in instances]
        futures: list[Future[Any] | None] = [
            None if known is None or known.thread is None else known.thread.ask(known.instance.get_reward)
            for known in environments
        ]
        try:
            rewards = []
            for instance, future in zip(instances, futures, strict=True):
                while future is not None and not future.done():
                    wait([future], timeout=PIECE)
                if future is not None:
                    rewards.append(future.result())
                else:
                    rewards.append(None if instance is None else instance.get_reward())
            return rewards
        except BaseException as error:  # Also the exception of `reward_timeout`.
            for known, future in zip(environments, futures, strict=True):
                if known is not None and future is not None:
                    known.stuck |= not future.done()
                    if future.done() and future.exception() is error:
                        self._advise(known.name, raised_outcome(error))
            raise

    def close(self) -> None:
        for environment in self._known.values():
            if environment.thread is not None:
                environment.thread.close()

    def _make(self, key: str | None) -> Environment:
        factory = self._factories[key]
        name, *others = factory_names(key, factory)
        thread = EnvironmentThread() if {name, *others}.isdisjoint(self._main_thread) else None
        try:
            instance = factory() if thread is None else thread.ask(factory).result()
        except (Exception, SystemExit) as error:
            outcome = raised_outcome(error)
            if thread is not None:
                thread.close()
                self._advise(name, outcome)
            place = place_in(outcome.value[1])
            most = f" Up to {self._limit} environments are in use at once on a rank."
            raise ValueError(
                f"environment_factory {name!r} couldn't make environment {len(self._known) + 1} of this rank"
                f"{f' ({place})' if place else ''}: {outcome.value[0].removesuffix(': ').removesuffix('.')}."
                f"{most if self._limit else ''}"
            ) from error
        environment = self._known.setdefault(id(instance), Environment(instance, name, key, thread))
        if thread is not None and environment.thread is not thread:  # The factory returned an earlier instance again.
            thread.close()
        return environment


def lending_stages(sampler: Any) -> Callable[[Stages], Stages] | None:
    box = getattr(getattr(sampler.hooks, "feature", None), "toolbox", None)
    if box is None:
        return None
    return lambda stages: dataclasses.replace(
        stages, begin_score=functools.partial(begin_lent, box.environments, stages.begin_score)
    )


def begin_lent(environments: Environments, begin: BeginScore, groups: Sequence[Group]) -> PendingRewards:
    """Start to score groups. Free their environments when all reward functions that may read them have returned."""
    environments.in_scoring |= {group.position for group in groups}
    pending, here = begin(groups), iter(list[Future[Any]]())
    if isinstance(pending, Scoring):
        pairs = zip(pending.scorer.rewards, pending.calls, strict=True)
        calls = [call for reward, call in pairs if not isinstance(reward.function, ModelReward)]
        here = iter([call for call in calls if not isinstance(call, WorkerCall)])

    def end_with_last(ended: Any = None) -> None:
        if (call := next(here, None)) is None:
            environments.end_scoring(groups)
        else:
            call.add_done_callback(end_with_last)

    end_with_last()
    return pending
