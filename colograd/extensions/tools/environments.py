"""`Environments`: makes environments with the user's factories, and lends each to one conversation at a time.

Each environment has a thread of its own (`EnvironmentThread`), unless `main_thread_tools` names the environment.
"""

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

Advise = Callable[[str, Outcome], None]  # (name of a tool or environment, outcome): warns if it needs the main thread.
PIECE = 0.2  # Maximum seconds of one wait for a reward.
CONTROL = ("reset", "get_reward")  # Public methods of an environment that the model can't call.


def on_this_device(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``work`` for another thread: set the CUDA device of this thread there (if CUDA is in use), then run it."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.current_device() if used else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        work()

    return run


class EnvironmentThread:
    """A thread that makes one environment and runs its methods, because a database connection or a browser of an
    environment may work only in the thread that opened it."""

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


@dataclass(slots=True, eq=False)
class Environment:
    """A user's environment, and the thread that made it and runs its methods."""

    instance: Any
    name: str  # Name of the environment in main_thread_tools.
    factory: str | None  # Key of the factory that made the environment.
    thread: EnvironmentThread | None  # Thread that runs the methods. None means the main thread.
    stuck: bool = False  # Whether a call was abandoned before it returned, so that the state is unknown.

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """The environment's public methods by name, without `reset` and `get_reward`. No property is evaluated. Raise
        ValueError if there is no `reset`."""
        names = [name for name, _ in inspect.getmembers(type(self.instance), predicate=inspect.isfunction)]
        if "reset" not in names:
            raise ValueError(
                f"environment_factory makes a {type(self.instance).__name__}, which has no method `reset`: define one. "
                "It begins an episode from the row's columns, and returns None or a text to append to the prompt."
            )
        tools = [name for name in names if name not in CONTROL and not name.startswith("_")]
        return {name: getattr(self.instance, name) for name in tools}


def factory_names(key: str | None, factory: Callable[[], Any]) -> list[str]:
    """Return an environment's names in main_thread_tools: its key in a dict of factories, and its factory's name."""
    own = function_name(factory)
    return [own] if key is None else [key, own]


class Environments:
    """Makes environments, lends each to one conversation, and makes it free again after scoring. An environment is lent
    until the reward functions that may read it have returned. A factory's key is the name in a row's column
    `environment`, or None if the run has a single factory."""

    def __init__(
        self, factories: Mapping[Any, Callable[[], Any]], main_thread: Collection[str], advise: Advise,
        limit: int | None,
    ) -> None:  # fmt: skip
        self._factories, self._main_thread, self._advise, self._limit = factories, main_thread, advise, limit
        self._known: dict[int, Environment] = {}  # All environments by `id(instance)`.
        self._lent: list[Environment] = []
        self._returning = threading.Lock()  # Guards `_lent`, because async reward functions end in other threads.
        self.in_scoring: set[int] = set()  # Positions of groups that reward functions are scoring.
        self._begins = True  # Whether the next environment that is lent is the first of a generation.
        self.latest: list[Any] | None = None  # Instances lent in the present or the last generation.
        self.first = {key: self._make(key) for key in factories}  # One environment per key, to describe its tools.
        self._free = {key: [environment] for key, environment in self.first.items()}

    def lend(self, key: str | None) -> Environment:
        """Return a free or new environment for one conversation. It is lent until `end_scoring` or `take_back`."""
        free = self._free[key]
        environment = free.pop() if free else self._make(key)
        self._lent.append(environment)
        if self._begins or self.latest is None:
            self._begins, self.latest = False, []
        self.latest.append(environment.instance)
        return environment

    def has_room(self, group: int) -> bool:
        """Return whether one more environment may be lent. The limit is at least ``group``, the number of conversations
        in a group, so that a whole group can run."""
        return self._limit is None or sum(not each.stuck for each in self._lent) < max(self._limit, group)

    def end_scoring(self, groups: Sequence[Group]) -> None:
        """Make the environments of ``groups`` free again, because their reward functions have returned."""
        scored = {id(rollout.columns.get("environments")) for group in groups for rollout in group.rollouts}
        with self._returning:
            for environment in [each for each in self._lent if id(each.instance) in scored]:
                self._lent.remove(environment)
                self._take_back(environment)
            self.in_scoring -= {group.position for group in groups}

    def take_back(self) -> None:
        """Make all lent environments free again, because no conversation of an earlier generation goes on."""
        with self._returning:
            for environment in self._lent:
                self._take_back(environment)
            self._lent, self.in_scoring, self._begins = [], set(), True

    def _take_back(self, environment: Environment) -> None:
        """Make an environment free again, or drop it if it is stuck. A dropped environment's thread ends once the stuck
        call returns."""
        if not environment.stuck:
            self._free[environment.factory].append(environment)
            return
        self._known.pop(id(environment.instance), None)
        if environment.thread is not None:
            environment.thread.close()

    def rewards(self, instances: Sequence[Any]) -> list[Any]:
        """Return ``get_reward()`` of each environment, None for None. If a call raises or `reward_timeout` is over,
        environments whose call hasn't returned become stuck."""
        environments = [self._known.get(id(instance)) for instance in instances]
        asked: list[Future[Any] | None] = [
            None if known is None or known.thread is None else known.thread.ask(known.instance.get_reward)
            for known in environments
        ]
        try:
            rewards = []
            for instance, future in zip(instances, asked, strict=True):
                while future is not None and not future.done():
                    wait([future], timeout=PIECE)  # `reward_timeout` can interrupt only between two waits.
                own = None if instance is None or future is not None else instance.get_reward()
                rewards.append(own if future is None else future.result())
            return rewards
        except BaseException as error:
            for known, future in zip(environments, asked, strict=True):
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
            most = f" Up to {self._limit} are lent at once (per_device_train_batch_size x steps_per_generation)."
            raise ValueError(
                f"environment_factory {name!r} raised {outcome.value[0].removesuffix(': ')} while making "
                f"environment {len(self._known) + 1} of this rank{f' ({place})' if place else ''}."
                f"{most if self._limit else ''}"
            ) from error
        environment = self._known.setdefault(id(instance), Environment(instance, name, key, thread))
        if thread is not None and environment.thread is not thread:  # The factory returned a known instance.
            thread.close()
        return environment


def lending_stages(sampler: Any) -> Callable[[Stages], Stages] | None:
    """Return a function that changes a run's stages so that environments are lent until their groups are scored. Return
    None for a run without tools."""
    box = getattr(getattr(sampler.hooks, "feature", None), "toolbox", None)
    if box is None:
        return None
    return lambda stages: dataclasses.replace(
        stages, begin_score=functools.partial(begin_lent, box.environments, stages.begin_score)
    )


def begin_lent(environments: Environments, begin: BeginScore, groups: Sequence[Group]) -> PendingRewards:
    """Start to score groups. Make their environments free when the last reward function's call in this process has
    ended, because worker processes and reward models don't use environments."""
    environments.in_scoring |= {group.position for group in groups}
    pending, here = begin(groups), iter(list[Future[Any]]())
    if isinstance(pending, Scoring):
        pairs = zip(pending.scorer.rewards, pending.calls, strict=True)
        alone = [call for reward, call in pairs if not isinstance(reward.function, ModelReward)]
        here = iter([call for call in alone if not isinstance(call, WorkerCall)])

    def end_with_last(ended: Any = None) -> None:
        if (call := next(here, None)) is None:
            environments.end_scoring(groups)
        else:
            call.add_done_callback(end_with_last)

    end_with_last()
    return pending
