"""Scoring groups: reward functions called in workers, on an event loop or here, while the engine goes on decoding.

    sync functions     in a worker process, where there are workers and the function can travel; else here, at once
    async functions    on one event loop in a thread, all groups together

A call that is late becomes an abstention, unless it runs here, where nothing can end it: that ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..batch import Group
from .calling import checked, keywords_for, raised, raised_elsewhere, takes_environments
from .functions import RewardError, RewardFunction
from .workers import CannotTravel, Outcome, Worker, WorkerPool, travelling

GRACE = 10.0  # seconds for a stuck function to notice that it was interrupted


class Scoring:
    """The rewards of some groups, on their way."""

    def __init__(self, scorer: Scorer, groups: Sequence[Group]) -> None:
        self._scorer = scorer
        self._position = groups[0].position
        self._size = sum(len(group.rollouts) for group in groups)
        self._calls: list[Future[Outcome]] = []  # [R]
        self.seconds: dict[str, float] = {}  # in each function, known once the result is

    def add(self, call: Future[Outcome]) -> None:
        """The next function's call."""
        self._calls.append(call)

    def done(self) -> bool:
        """Whether `result` wouldn't have to wait."""
        return all(call.done() for call in self._calls)

    def cancel(self) -> None:
        """Drop what hasn't begun."""
        for call in self._calls:
            call.cancel()

    def result(self) -> torch.Tensor:
        """Wait for the rewards, [completions, R] float32, NaN where a function abstained.

        Raises:
            RewardError: a function raised, died, or didn't return one number per completion, unless errors abstain.
        """
        rewards, columns = self._scorer.rewards, []
        for reward, call in zip(rewards, self._calls, strict=True):
            try:
                columns.append(self._column(reward, call))
            except RewardError:
                self._scorer.counts[f"rewards/{reward.name}/errors"] += 1
                if self._scorer.on_error == "raise":
                    self.cancel()
                    raise
                columns.append([float("nan")] * self._size)
        return torch.tensor(columns, dtype=torch.float32).reshape(len(rewards), -1).T.contiguous()

    def _column(self, reward: RewardFunction, call: Future[Outcome]) -> list[float]:
        try:
            outcome = call.result()
        except Exception as error:
            raise raised(reward, self._position, error) from None
        self.seconds[reward.name] = outcome.seconds
        self._scorer.counts[f"rewards/{reward.name}/seconds"] += outcome.seconds
        if outcome.kind == "late":
            self._scorer.counts[f"rewards/{reward.name}/timeouts"] += 1
            return [float("nan")] * self._size
        if outcome.kind == "raised":
            raise raised_elsewhere(reward, self._position, *outcome.value)
        if outcome.kind == "died":
            raise RewardError(
                reward.name,
                self._position,
                None,
                f"its worker process ended with status {outcome.value}: it exits, crashes, or runs out of memory. Set "
                "reward_on_error: abstain to go on without its opinion.",
            )
        return checked(reward, self._position, self._size, outcome.value)


class Ready:
    """Rewards that are there already: a `Scoring` that has nothing to wait for."""

    def __init__(self, rewards: torch.Tensor) -> None:
        self._rewards = rewards

    def done(self) -> bool:
        return True

    def result(self) -> torch.Tensor:
        return self._rewards


class Scorer:
    """Calls reward functions on groups.

    Args:
        rewards: R functions.
        workers: processes for those that can travel; 0: everything runs in this one.
        timeout: seconds that a call may take; None: any.
        on_error: ``raise`` ends the run with the function's error, ``abstain`` goes on without its opinion.
    """

    def __init__(
        self, rewards: Sequence[RewardFunction], workers: int = 0, timeout: float | None = None, on_error: str = "raise"
    ) -> None:
        self.rewards, self.timeout, self.on_error = list(rewards), timeout, on_error
        self.counts: dict[str, float] = defaultdict(float)  # metrics since `take_counts`
        self.notes: list[str] = []  # for the user
        self._numbers: dict[int, int] = {}  # of the functions that run in workers: their numbers there
        self._pool: WorkerPool | None = None
        self._state: tuple[Any, bytes] = (None, b"")
        if workers:
            self._open(workers)

    def submit(self, groups: Sequence[Group], texts: Sequence[Sequence[str]], trainer_state: Any = None) -> Scoring:
        """Begin to score some groups with one call of each function; see `keywords_for` for the arguments.

        Functions that run here have returned when this does.

        Raises:
            RewardError: of a function that runs here, or that lacks a column.
        """
        scoring = Scoring(self, groups)
        try:
            for index, reward in enumerate(self.rewards):
                scoring.add(self._begin(index, reward, groups, texts, trainer_state))
        except RewardError:
            scoring.cancel()
            raise
        return scoring

    def take_counts(self) -> dict[str, float]:
        """Sums since the last call: ``rewards/<name>/seconds``, ``/timeouts`` and ``/errors``."""
        taken = dict(self.counts)
        self.counts.clear()
        return taken

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _open(self, workers: int) -> None:
        able: dict[int, bytes] = {}
        for index, reward in enumerate(self.rewards):
            if inspect.iscoroutinefunction(reward.function):
                continue
            if takes_environments(reward):
                self._stays(reward, CannotTravel("it takes environments, which live here"))
                continue
            try:
                able[index] = travelling(reward.function)
            except CannotTravel as reason:
                self._stays(reward, reason)
        try:
            Worker(list(able.values())).probe()
        except CannotTravel:  # find out which; a start takes as long as the functions' imports
            for index in list(able):
                try:
                    Worker([able[index]]).probe()
                except CannotTravel as reason:
                    del able[index]
                    self._stays(self.rewards[index], reason)
        if able:
            self._pool = WorkerPool(list(able.values()), workers, self.timeout)
            self._numbers = {index: number for number, index in enumerate(able)}
            names = ", ".join(self.rewards[index].name for index in able)
            self.notes.insert(0, f"rewards: {names} in {workers} worker process(es)")

    def _stays(self, reward: RewardFunction, reason: CannotTravel) -> None:
        self.notes.append(f"rewards: {reward.name} runs in the trainer's process ({reason})")

    def _begin(
        self,
        index: int,
        reward: RewardFunction,
        groups: Sequence[Group],
        texts: Sequence[Sequence[str]],
        trainer_state: Any,
    ) -> Future[Outcome]:
        if self._pool is not None and index in self._numbers:
            keywords = keywords_for(reward, groups, texts, None)
            keywords.pop("environments", None)
            return self._pool.submit(self._numbers[index], keywords, self._pickled(trainer_state))
        done: Future[Outcome] = Future()
        keywords = keywords_for(reward, groups, texts, trainer_state)
        started = time.perf_counter()
        try:
            with self._watched(reward):
                value = reward.function(**keywords)
        except Exception as error:
            done.set_exception(error)
            if self.on_error == "raise":
                raise raised(reward, groups[0].position, error) from None
            return done
        elapsed = time.perf_counter() - started
        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(_awaited(value, elapsed, self.timeout), event_loop())
        done.set_result(Outcome("value", value, elapsed))
        return done

    def _pickled(self, trainer_state: Any) -> tuple[Any, bytes]:
        """The trainer's state with a key that changes with it: pickled once per step, not once per call.

        transformers' state travels as its bare fields: a worker that had to import transformers for it would spend the
        first call's deadline on that.
        """
        key = getattr(trainer_state, "global_step", None)
        if not self._state[1] or key != self._state[0]:
            bare = SimpleNamespace(**vars(trainer_state)) if is_dataclass(trainer_state) else trainer_state
            self._state = (key, pickle.dumps(bare))
        return self._state

    @contextlib.contextmanager
    def _watched(self, reward: RewardFunction) -> Iterator[None]:
        """End a call in this process that takes too long, and with it the run: by an exception if it can be raised."""
        if self.timeout is None:
            yield
            return
        main, seconds = threading.get_ident(), self.timeout
        problem = (
            f"reward function {reward.name!r} took longer than reward_timeout ({seconds:g} s) in the trainer's "
            "process, where it can't be ended alone: set reward_workers, or make it async."
        )

        def interrupt() -> None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(_Stuck))

        def leave() -> None:
            print(problem, file=sys.stderr, flush=True)
            os._exit(1)  # the launcher ends the other ranks

        timers = [threading.Timer(seconds, interrupt), threading.Timer(seconds + GRACE, leave)]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            yield
        except _Stuck:
            raise TimeoutError(problem) from None
        finally:
            for timer in timers:
                timer.cancel()


class _Stuck(BaseException):
    """Raised in a call that took too long. Not an Exception, which user code may catch."""


def score_group(
    functions: Sequence[RewardFunction], group: Group, completions: Sequence[str], trainer_state: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Call every function on one group, in this process.

    Returns:
        Rewards [G, R] float32, NaN where a function abstained, and each function's seconds by name.

    Raises:
        RewardError: a function raised, or didn't return G numbers.
    """
    scoring = Scorer(functions).submit([group], [completions], trainer_state)
    return scoring.result(), scoring.seconds


async def _awaited(awaitable: Awaitable[Any], elapsed: float, timeout: float | None) -> Outcome:
    started = time.perf_counter()
    try:
        value = await asyncio.wait_for(awaitable, timeout)
    except TimeoutError:
        if timeout is not None and time.perf_counter() - started >= timeout:
            return Outcome("late", None, elapsed + timeout)
        raise
    return Outcome("value", value, elapsed + time.perf_counter() - started)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole run, not one per group: HTTP clients that users keep between calls are bound to theirs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="colograd-rewards", daemon=True).start()
    return loop
