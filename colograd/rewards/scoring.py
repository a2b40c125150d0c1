"""Score groups: call reward functions while the engine is still generating.

    sync functions     in a worker process if `Scorer` has one for the function, else in this process
    async functions    on one event loop in a thread, all groups concurrently
    reward models      in this process, all waiting groups together, when the first result is needed

`reward_timeout` limits all calls except calls of reward models."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import pickle
import time
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from ..batch import Group, Logged
from ..parallel import watchdog
from ..runtime import process
from ..usercode.calls import GRACE, Late, Outcome, awaited_outcome, event_loop, raised_outcome, time_limit, when_done
from ..usercode.untrusted import own_copy, storable
from ..usercode.worker_pool import WorkerCall, WorkerPool
from ..usercode.worker_process import CallLog
from .calling import Texts, checked_values, keywords_for, parameters_of
from .functions import ModelReward, RewardError, RewardFunction, check_log, is_async, is_of_module, raised_error

T = TypeVar("T")
MOST_WORKERS = 4


@dataclass(eq=False)
class Scoring:
    scorer: Scorer
    groups: Sequence[Group]
    calls: Sequence[Future[Outcome]]  # One call per reward function, [R].

    def done(self) -> bool:
        return all(call.done() for call in self.calls)

    def cancel(self) -> None:
        """Cancel the calls. The worker process of a running call may be killed."""
        for call in self.calls:
            call.cancel()

    def result(self) -> torch.Tensor:
        """Wait for all calls. Return rewards, float32 [completions, R]. NaN: a function abstained, was late, or failed.
        But with `reward_on_error: raise` a failed call raises RewardError."""
        scorer, log, position = self.scorer, CallLog(), self.groups[0].position
        scorer.score_with_models()
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        rewards = list[list[float]]()
        for reward, call in zip(scorer.rewards, self.calls, strict=True):
            watchdog.progress(f"reward function {reward.name!r}")
            rewards.append([math.nan] * len(rollouts))
            try:
                outcome = scorer.outcome_of(reward.name, call, position, len(rollouts))
                if outcome.kind == "late":
                    continue
                if outcome.kind == "raised":
                    raise raised_error(reward, self.groups[0], outcome)
                columns, metrics = outcome.logged
                if columns or metrics:
                    check_log(reward, position, rollouts, columns, metrics)
                if both := columns.keys() & log.columns.keys():
                    problem = f"the function logged the column {min(both)!r}, as another function did: rename one."
                    raise RewardError(reward.name, position, None, problem)
                rewards[-1] = scorer.check(reward, self.groups, outcome.value)
            except RewardError:
                scorer.counts[f"rewards/{reward.name}/errors"] += 1
                if scorer.on_error == "raise":
                    self.cancel()
                    raise
                continue
            log.columns |= columns
            for name, values in metrics.items():
                log.metrics.setdefault(name, []).extend(values)
        start, metrics_of = 0, {name: (sum(values), len(values)) for name, values in log.metrics.items()}
        for group in self.groups:  # The first group gets the metrics that the call logged for all groups.
            own = slice(start, start + len(group.rollouts))
            cut = {storable(name): tuple(map(storable, values[own])) for name, values in log.columns.items()}
            scorer.logged[group.position] = Logged(cut, metrics_of)
            start, metrics_of = own.stop, {}
        return torch.tensor(rewards, dtype=torch.float32).reshape(len(rewards), len(rollouts)).T.contiguous()


class Ready(Future[T]):
    def __init__(self, result: T) -> None:
        super().__init__()
        self.set_result(result)


def usual_workers(on_gpu: bool) -> int:
    """Return the default number of reward workers per rank. Without a GPU it is 0: sampling uses all cores there."""
    return min(MOST_WORKERS, max(1, process.cpu_threads() - 1)) if on_gpu else 0


@dataclass(eq=False)
class Scorer:
    rewards: list[RewardFunction]  # Reward functions, [R].
    # Number of worker processes. They run functions that can be pickled. None: `usual_workers`, which run only
    # functions of importable modules.
    workers: int | None = 0
    timeout: float | None = None  # Time limit of a call in seconds. Reward models have none.
    on_error: str = "raise"
    on_gpu: bool = False

    def __post_init__(self) -> None:
        self.reads_prompt_texts = any("prompt_texts" in parameters_of(reward.function) for reward in self.rewards)
        self.counts: dict[str, float] = defaultdict(float)
        self.logged: dict[int, Logged] = {}
        self.check = checked_values  # Checks returned rewards. An extension may replace this function.
        # Called after each call with the function's name, start and end in seconds, and the number of completions.
        self.on_call: Callable[[str, float, float, int], None] | None = None
        self._told_late: set[str] = set()
        self._state: tuple[Any, Any] = ((), None)  # Key (step, epoch, ...) and copy of the trainer's state.
        self._pickled: tuple[Any, bytes] = ((), b"")
        self._for_models: list[tuple[ModelReward, dict[str, Any], Future[Outcome]]] = []
        sync = [r for r in self.rewards if not (isinstance(r.function, ModelReward) or is_async(r.function))]
        # A function that reads environments runs in this process, because environments live here.
        able = {r.name: r.function for r in sync if "environments" not in parameters_of(r.function)}
        if (workers := self.workers) is None:
            able = {name: function for name, function in able.items() if is_of_module(function)}
            workers = usual_workers(self.on_gpu)
        self._pool = WorkerPool("rewards", able, workers, self.timeout)
        self.notes = self._pool.notes

    def submit(self, groups: Sequence[Group], texts: Texts, trainer_state: Any = None) -> Scoring:
        """Start one call per reward function. Wait only for sync functions that run in this process."""
        calls: list[Future[Outcome]] = []
        scoring, completions = Scoring(self, groups, calls), sum(map(len, texts))
        try:
            for reward in self.rewards:
                calls.append(self._begin_call(reward, groups, texts, trainer_state))
                if (tell := self.on_call) is not None:
                    when_done(calls[-1], functools.partial(tell, reward.name), completions)
        except RewardError:
            scoring.cancel()
            raise
        return scoring

    def outcome_of(self, name: str, call: Future[Outcome], position: int, completions: int) -> Outcome:
        # An async call ends at its own timeout. This longer limit is for a blocked event loop.
        limit = None if isinstance(call, WorkerCall) or self.timeout is None else self.timeout + GRACE
        fail = functools.partial(RewardError, name, position, None)
        try:
            outcome = call.result(limit)
        except TimeoutError:
            remedy = "await slow calls, or make the function sync and set reward_workers"
            limit_text = f"reward_timeout ({self.timeout:g} s)"
            raise fail(
                f"the function or another one blocks the event loop for longer than {limit_text}: {remedy}."
            ) from None
        self.counts[f"rewards/{name}/seconds"] += outcome.seconds
        if outcome.kind == "died":
            why = "it exited, crashed or had no memory. Set `reward_on_error: abstain` to go on without such rewards"
            raise fail(f"the function's worker process ended with status {outcome.value}: {why}.")
        if outcome.kind == "late":
            self.counts[f"rewards/{name}/timeouts"] += 1
            if name not in self._told_late:
                self._told_late.add(name)
                warnings.warn(
                    f"reward function {name!r} gave no answer within reward_timeout ({self.timeout:g} s) on "
                    f"{completions} completions. It abstains from them: only the other functions' rewards count. "
                    f"rewards/{name}/timeouts counts such calls from now on.",
                    stacklevel=2,
                )
        return outcome

    def take_counts(self) -> dict[str, float]:
        taken, self.counts = self.counts, defaultdict(float)
        return taken

    def take_logged(self, position: int) -> Logged:
        return self.logged.pop(position, Logged({}, {}))

    def score_with_models(self) -> None:
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
            each, of_calls = (time.perf_counter() - started) / max(len(values), 1), iter(values)
            for keywords, call in calls:
                own = [*itertools.islice(of_calls, len(keywords["prompts"]))]
                call.set_result(Outcome("value", own, each * len(own)))

    def close(self) -> None:
        self._pool.close()

    def _begin_call(
        self, reward: RewardFunction, groups: Sequence[Group], texts: Texts, trainer_state: Any
    ) -> Future[Outcome]:
        fields = vars(trainer_state) if hasattr(trainer_state, "__dict__") else {}
        key = (fields.get("global_step"), fields.get("epoch"), len(fields.get("log_history") or ()))
        if key != self._state[0]:  # Reward functions get a copy, because they may change it.
            self._state = (key, copy.copy(trainer_state))
            for name, value in fields.items():
                setattr(self._state[1], name, own_copy(value))
        state = self._state[1]
        if reward.name in self._pool:
            if key != self._pickled[0]:
                # A worker gets transformers' `TrainerState` as a `SimpleNamespace`. Importing transformers there
                # could use up the first call's time limit.
                bare = SimpleNamespace(**vars(state)) if dataclasses.is_dataclass(state) else state
                self._pickled = (key, pickle.dumps(bare))
            keywords = keywords_for(reward, groups, texts, None)
            keywords.pop("environments", None)
            return self._pool.submit(reward.name, keywords, self._pickled)
        log = CallLog()
        keywords = keywords_for(reward, groups, texts, state, log)
        if isinstance(reward.function, ModelReward):
            self._for_models.append((reward.function, keywords, Future()))
            return self._for_models[-1][2]
        started = time.perf_counter()
        watchdog.progress(f"reward function {reward.name!r}")
        problem = (
            f"it gave no answer within reward_timeout ({self.timeout or 0:g} s) on {sum(map(len, texts))} completions. "
            "It runs in the trainer's process, where a call can't be ended alone, so the run ends: raise "
            "reward_timeout, or set reward_workers or make it async, where a late call abstains and training goes on."
        )
        late = RewardError(reward.name, groups[0].position, None, problem)
        try:
            with time_limit(self.timeout, str(late)):
                value = reward.function(**keywords)
        except Late:
            if self.on_error == "raise":
                raise late from None
            return Ready(Outcome("late", None, self.timeout or 0.0))
        except (Exception, SystemExit) as error:  # SystemExit would end this rank silently.
            if self.on_error == "raise":
                raise raised_error(reward, groups[0], raised_outcome(error)) from None
            return Ready(raised_outcome(error))
        elapsed = time.perf_counter() - started
        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(_logged_outcome(value, elapsed, self.timeout, log), event_loop())
        return Ready(Outcome("value", value, elapsed, (log.columns, log.metrics)))


async def _logged_outcome(awaitable: Awaitable[Any], elapsed: float, timeout: float | None, log: CallLog) -> Outcome:
    outcome = await awaited_outcome(awaitable, timeout)
    return dataclasses.replace(outcome, seconds=elapsed + outcome.seconds, logged=(log.columns, log.metrics))
