"""Scoring groups: reward functions run in workers, on an event loop or in this process, while the engine decodes.

    sync functions     in a worker process, if there are workers and the function can be pickled; else here, at once
    async functions    on one event loop in a thread, all groups together
    reward models      here, all waiting groups together, when the first result is needed after the generation

A late call becomes an abstention. But a late call in this process ends the run, as nothing can reliably end the call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from ..batch import Group, Logged, Rollout
from ..parallel import watchdog
from ..riders import Rider
from ..runtime import process
from ..runtime.registry import hooks, require
from ..usercode.calls import (
    GRACE,
    Late,
    Outcome,
    PendingCalls,
    event_loop,
    raised_outcome,
    time_limit,
    when_all_done,
    when_done,
)
from ..usercode.untrusted import storable
from ..usercode.worker_pool import WorkerCall, WorkerPool
from ..usercode.worker_process import CallLog
from .calling import SplitParts, checked_values, keywords_for, parameters_of
from .functions import ModelReward, RewardError, RewardFunction, is_async, is_of_module
from .outcomes import StateCopies, late_error, logged_outcome, raised_error
from .values import check_log, with_parts

MOST_WORKERS = 4  # maximum number of workers by default


class Scoring(PendingCalls[Future[Outcome]]):
    """The pending rewards of some groups: `PendingRewards` of rollout/stages.py."""

    def __init__(self, scorer: Scorer, groups: Sequence[Group], calls: Sequence[Future[Outcome]]) -> None:
        super().__init__(calls)  # [R]
        self._scorer = scorer
        self._first = groups[0]
        self._sizes = {group.position: len(group.rollouts) for group in groups}
        self._rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._size = len(self._rollouts)

    def result(self) -> torch.Tensor:
        """Wait for the rewards. Return them as [completions, R] float32, NaN where a function abstained.

        Then `Scorer.take_logged` returns the logged values, and `Scorer.take_turns` the rewards of parts.

        Raises:
            RewardError: a function raised, died, didn't return one number per completion, or logged invalid values.
                With `on_error="abstain"` the function abstains instead.
        """
        self._scorer.score_with_models()
        rewards, columns, log = self._scorer.rewards, [], CallLog()
        of_parts: dict[str, list[Any]] = {}  # by function, one per completion
        for reward, call in zip(rewards, self._calls, strict=True):
            watchdog.progress(f"reward function {reward.name!r}")
            try:
                column, parts = self._column(reward, call, log)
                columns.append(column)
                if any(each is not None for each in parts):
                    of_parts[reward.name] = parts
            except RewardError:
                self._scorer.counts[f"rewards/{reward.name}/errors"] += 1
                if self._scorer.on_error == "raise":
                    self.cancel()
                    raise
                columns.append([float("nan")] * self._size)
        self._scorer.logged |= self._logged_by_group(log)
        self._scorer.of_parts |= self._parts_by_group(of_parts)
        return torch.tensor(columns, dtype=torch.float32).reshape(len(rewards), self._size).T.contiguous()

    def _logged_by_group(self, log: CallLog) -> dict[int, Logged]:
        """Return the logged columns, cut by group. The first group gets the metrics, which are of the whole call."""
        found, start = {}, 0
        metrics = {name: (sum(values), len(values)) for name, values in log.metrics.items()}
        for position, size in self._sizes.items():
            cut = {
                storable(name): tuple(map(storable, values[start : start + size]))
                for name, values in log.columns.items()
            }
            found[position] = Logged(cut, metrics)
            start, metrics = start + size, {}
        return found

    def _parts_by_group(self, of_parts: Mapping[str, Sequence[Any]]) -> dict[int, dict[str, list[Any]]]:
        found, start = dict[int, dict[str, list[Any]]](), 0
        for position, size in self._sizes.items() if of_parts else ():
            found[position] = {name: [*parts[start : start + size]] for name, parts in of_parts.items()}
            start += size
        return found

    def _column(self, reward: RewardFunction, call: Future[Outcome], log: CallLog) -> tuple[list[float], list[Any]]:
        """Return one function's rewards and its rewards of parts of completions. Add its logged values to ``log``."""
        timeout = self._scorer.timeout
        # An async call ends itself in time, unless it blocks the event loop.
        limit = None if isinstance(call, WorkerCall) or timeout is None else timeout + GRACE
        try:
            outcome = call.result(limit)
        except futures.TimeoutError:
            raise self._error(
                reward,
                f"it blocks the event loop: reward_timeout ({timeout:g} s) is long over. Await what takes time, or "
                "make it a plain function and set reward_workers.",
            ) from None
        self._scorer.counts[f"rewards/{reward.name}/seconds"] += outcome.seconds
        if outcome.kind == "late":
            self._scorer.note_late(reward.name, self._size)
            return [float("nan")] * self._size, []
        if outcome.kind == "raised":
            raise raised_error(reward, self._first, outcome)
        if outcome.kind == "died":
            raise self._error(
                reward,
                f"its worker process ended with status {outcome.value}: it exits, crashes, or runs out of memory. Set "
                "reward_on_error: abstain to go on without its opinion.",
            )
        column, parts = checked_values(
            reward, self._first.position, self._rollouts, outcome.value, self._scorer.split_parts
        )
        check_log(reward, self._first.position, self._size, outcome.logged)
        columns, metrics = outcome.logged
        if "token_weights" in columns:  # without its extension they would have no effect
            require("token_weights", f"the column token_weights, which {reward.name} logs,", "log no such column")
        for kind in self._scorer.logged_riders:
            for index, value in enumerate(columns.get(kind.COLUMN, ())):
                try:
                    _rider_of(kind, value, self._rollouts[index])
                except ValueError as error:
                    problem = f"it logged {kind.COLUMN} of {error}"
                    raise RewardError(reward.name, self._first.position, index, problem) from None
        for name in columns.keys() & log.columns.keys():
            raise self._error(reward, f"it logged the column {name!r}, as another reward function did: rename it.")
        log.columns |= columns
        for name, values in metrics.items():
            log.metrics.setdefault(name, []).extend(values)
        return column, parts

    def _error(self, reward: RewardFunction, problem: str) -> RewardError:
        return RewardError(reward.name, self._first.position, None, problem)


def _rider_of(kind: type[Rider], value: Any, rollout: Rollout) -> tuple[Rider, ...]:
    """Return the rider that a reward function logged for a completion, or ()."""
    return () if value is None else (kind.from_json(value, rollout),)


class Lender(Protocol):
    """Lends environments to conversations: `rollout.environments.Environments`."""

    def begin_scoring(self, groups: Sequence[Group]) -> None: ...
    def end_scoring(self, groups: Sequence[Group]) -> None: ...


class Ready(Future[torch.Tensor]):
    """Rewards that are already computed: `PendingRewards` with nothing to wait for."""

    def __init__(self, rewards: torch.Tensor) -> None:
        super().__init__()
        self.set_result(rewards)


def usual_workers(on_gpu: bool) -> int:
    """Return the default number of workers: 0 on a CPU, as its cores sample; else 1 to 4, by the rank's cores."""
    return min(MOST_WORKERS, max(1, process.cpu_threads() - 1)) if on_gpu else 0


class Scorer:
    """Calls reward functions on groups.

    Args:
        rewards: R reward functions.
        workers: number of worker processes for functions that can be pickled. 0: all functions run in this process.
            None: `usual_workers`, for functions that can be imported.
        timeout: maximum seconds of a call; None: no limit.
        on_error: ``raise`` ends the run with the function's error; with ``abstain`` the function abstains.
        on_gpu: whether the policy trains and samples on a GPU.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunction],
        workers: int | None = 0,
        timeout: float | None = None,
        on_error: str = "raise",
        on_gpu: bool = False,
    ) -> None:
        self.rewards, self.timeout, self.on_error = list(rewards), timeout, on_error
        self.reads_prompt_texts = any("prompt_texts" in parameters_of(reward.function) for reward in self.rewards)
        self.counts: dict[str, float] = defaultdict(float)  # metrics since `take_counts`
        self.logged: dict[int, Logged] = {}  # by position, until `take_logged`
        self.of_parts: dict[int, dict[str, list[Any]]] = {}  # by position and function, until `take_turns`
        self.split_parts: SplitParts | None = next(iter(hooks("part_rewards")), None)
        self.logged_riders: list[type[Rider]] = [kind for kind in hooks("riders") if kind.COLUMN]
        # Called with a function's name, the start and the end of a call, and its number of completions.
        self.on_call: Callable[[str, float, float, int], None] | None = None
        self.environments: Lender | None = None  # takes a group's environments back once it is scored
        self._told_late: set[str] = set()
        self._state = StateCopies()
        self._for_models: list[tuple[ModelReward, dict[str, Any], Future[Outcome]]] = []  # waiting calls
        sync = [r for r in self.rewards if not (isinstance(r.function, ModelReward) or is_async(r.function))]
        here = [reward for reward in sync if "environments" in parameters_of(reward.function)]
        able = {reward.name: reward.function for reward in sync if reward not in here}
        if workers is None:
            able = {name: function for name, function in able.items() if is_of_module(function)}
            workers = usual_workers(on_gpu)
        self._pool = WorkerPool("rewards", able, workers, timeout)
        self.notes = self._pool.notes  # messages for the user
        if workers:
            why = "it takes environments, which live here"
            self.notes += [f"rewards: {reward.name} runs in the trainer's process ({why})" for reward in here]

    def submit(self, groups: Sequence[Group], texts: Sequence[Sequence[str]], trainer_state: Any = None) -> Scoring:
        """Begin to score some groups with one call of each function; see `keywords_for` for the arguments.

        Sync functions in this process have ended when this returns.

        Raises:
            RewardError: a function in this process failed, or a function needs a missing column.
        """
        calls: list[Future[Outcome]] = []
        scoring = Scoring(self, groups, calls)
        if self.environments is not None:
            self.environments.begin_scoring(groups)
        try:
            for reward in self.rewards:
                calls.append(self._begin_call(reward, groups, texts, trainer_state))
                self._watch(reward.name, calls[-1], sum(map(len, texts)))
        except RewardError:
            scoring.cancel()
            raise
        if (lender := self.environments) is not None:
            here = [call for reward, call in zip(self.rewards, calls, strict=True) if self._runs_here(reward)]
            when_all_done(here, lambda: lender.end_scoring(groups))
        return scoring

    def _runs_here(self, reward: RewardFunction) -> bool:
        """Return whether the function runs in this process, where environments live."""
        return reward.name not in self._pool and not isinstance(reward.function, ModelReward)

    def _watch(self, name: str, call: Future[Outcome], completions: int) -> None:
        if (tell := self.on_call) is not None:
            when_done(call, lambda started, ended: tell(name, started, ended, completions))

    def note_late(self, name: str, completions: int) -> None:
        """Count a late call, and warn the first time, because the function abstains from its completions."""
        self.counts[f"rewards/{name}/timeouts"] += 1
        if name not in self._told_late:
            self._told_late.add(name)
            warnings.warn(
                f"reward function {name!r} gave no answer within reward_timeout ({self.timeout:g} s) on {completions} "
                "completions. It abstains from them: what the other functions say of them counts, and without another "
                f"they aren't trained on. rewards/{name}/timeouts counts such calls from now on.",
                stacklevel=2,
            )

    def take_counts(self) -> dict[str, float]:
        """Return the sums since the last call: ``rewards/<name>/seconds``, ``/timeouts`` and ``/errors``."""
        taken = dict(self.counts)
        self.counts.clear()
        return taken

    def take_logged(self, position: int) -> Logged:
        """Return the values that functions logged for the group at ``position``. Its rewards must be computed."""
        return self.logged.pop(position, Logged({}, {}))

    def take_turns(self, group: Group) -> Group:
        """Return the group with the functions' rewards of its completions' parts, and the riders that they logged."""
        group, logged = with_parts(group, self.of_parts.pop(group.position, {})), self.logged.get(group.position)
        for kind in self.logged_riders:
            if logged is not None and (values := logged.columns.get(kind.COLUMN)) is not None:
                pairs = zip(group.rollouts, values, strict=True)
                rollouts = (rollout.carrying(*_rider_of(kind, value, rollout)) for rollout, value in pairs)
                group = dataclasses.replace(group, rollouts=tuple(rollouts))
        return group

    def score_with_models(self) -> None:
        """Score all waiting completions with the reward models."""
        waiting, self._for_models = self._for_models, []
        for model in dict.fromkeys(model for model, _, _ in waiting):
            calls = [(k, call) for m, k, call in waiting if m is model and call.set_running_or_notify_cancel()]
            prompts = [prompt for keywords, _ in calls for prompt in keywords["prompts"]]
            completions = [completion for keywords, _ in calls for completion in keywords["completions"]]
            started = time.perf_counter()
            try:
                values = model(prompts, completions)
            except Exception as error:
                for _, call in calls:
                    call.set_result(raised_outcome(error))
                continue
            each = (time.perf_counter() - started) / max(len(values), 1)
            start = 0
            for keywords, call in calls:
                size = len(keywords["prompts"])
                call.set_result(Outcome("value", values[start : start + size], each * size))
                start += size

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _begin_call(
        self, reward: RewardFunction, groups: Sequence[Group], texts: Sequence[Sequence[str]], trainer_state: Any
    ) -> Future[Outcome]:
        if reward.name in self._pool:
            keywords = keywords_for(reward, groups, texts, None)
            keywords.pop("environments", None)
            return self._pool.submit(reward.name, keywords, self._state.pickled(trainer_state))
        done: Future[Outcome] = Future()
        log = CallLog()
        keywords = keywords_for(reward, groups, texts, self._state.copy(trainer_state)[1], log)
        if isinstance(reward.function, ModelReward):
            self._for_models.append((reward.function, keywords, done))
            return done
        started = time.perf_counter()
        watchdog.progress(f"reward function {reward.name!r}")
        late = late_error(reward, groups[0].position, self.timeout, sum(map(len, texts)))
        try:
            with time_limit(self.timeout, str(late)):
                value = reward.function(**keywords)
        except Late:
            if self.on_error == "raise":
                raise late from None
            done.set_result(Outcome("late", None, self.timeout or 0.0))
            return done
        except (Exception, SystemExit) as error:  # SystemExit would end this rank without a message
            done.set_result(raised_outcome(error))
            if self.on_error == "raise":
                raise raised_error(reward, groups[0], done.result()) from None
            return done
        elapsed = time.perf_counter() - started
        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(logged_outcome(value, elapsed, self.timeout, log), event_loop())
        done.set_result(Outcome("value", value, elapsed, log.content()))
        return done


def score_group(
    functions: Sequence[RewardFunction], group: Group, completions: Sequence[str], trainer_state: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Call every function on one group, in this process.

    Returns:
        Rewards [G, R] float32, NaN where a function abstained, and each function's seconds by name.

    Raises:
        RewardError: a function raised, or didn't return G numbers.
    """
    scorer = Scorer(functions)
    rewards = scorer.submit([group], [completions], trainer_state).result()
    return rewards, {reward.name: scorer.counts[f"rewards/{reward.name}/seconds"] for reward in functions}
