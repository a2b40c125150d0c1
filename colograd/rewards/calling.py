"""Calling a reward function on a group: its keywords, its time, what it raised, and whether it returned rewards."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import numbers
import reprlib
import threading
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..batch import Group
from .functions import RewardError, RewardFunction

RESERVED = ("prompt", "prompts", "completions", "completion_ids", "trainer_state")
FLOAT32_MAX = torch.finfo(torch.float32).max


def score_group(
    functions: Sequence[RewardFunction], group: Group, completions: Sequence[str], trainer_state: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Call every function on one group.

    Args:
        functions: R of them.
        group: G rollouts of one prompt. Where ``group.example["prompt"]`` is a list of messages, functions get each
            completion as ``[{"role": "assistant", "content": text}]``, otherwise as text.
        completions: [G] decoded texts.
        trainer_state: the Trainer's state, for rewards that follow the training's progress.

    Returns:
        Rewards [G, R] float32, NaN where a function abstained, and each function's seconds by name.

    Raises:
        RewardError: a function raised, or didn't return G numbers.
    """
    assert len(completions) == len(group.rollouts), (len(completions), len(group.rollouts))
    values: list[Any] = []
    seconds: dict[str, float] = {}
    for reward in functions:
        start = time.perf_counter()
        try:
            keywords = _keywords(reward, group, completions, trainer_state)
            values.append(reward.function(**keywords))
        except Exception as error:
            _close(values)
            raise _raised(reward, group, error) from None
        seconds[reward.name] = time.perf_counter() - start
    pending = {index: value for index, value in enumerate(values) if inspect.isawaitable(value)}
    for index, (outcome, elapsed) in _gather(pending).items():
        if isinstance(outcome, BaseException):
            raise _raised(functions[index], group, outcome) from None
        values[index] = outcome
        seconds[functions[index].name] += elapsed
    columns = [_checked(reward, group, value) for reward, value in zip(functions, values, strict=True)]
    return torch.tensor(columns, dtype=torch.float32).reshape(len(functions), -1).T.contiguous(), seconds


def _keywords(reward: RewardFunction, group: Group, completions: Sequence[str], trainer_state: Any) -> dict[str, Any]:
    """The keywords of one call, made of copies: a function that changes its arguments changes nobody else's."""
    size = len(completions)
    prompt = group.example["prompt"]
    conversational = isinstance(prompt, list)
    keywords: dict[str, Any] = {
        "prompts": [[dict(message) for message in prompt] if conversational else prompt for _ in range(size)],
        "completions": [[{"role": "assistant", "content": c}] if conversational else c for c in completions],
        "completion_ids": [list(rollout.completion_ids) for rollout in group.rollouts],
        "trainer_state": trainer_state,
    }
    for column, value in group.example.items():
        if column not in RESERVED:
            keywords[column] = [copy.copy(value) for _ in range(size)]
    try:
        parameters = inspect.signature(reward.function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C don't tell
        return keywords
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
    missing = [
        p.name
        for p in parameters
        if p.name not in keywords and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise RewardError(
            reward.name,
            group.position,
            None,
            f"it needs {', '.join(map(repr, missing))}, but the example has the columns "
            f"{', '.join(map(repr, group.example))}: add the column to the dataset, or give the parameter a default.",
        )
    return keywords


def _raised(reward: RewardFunction, group: Group, error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return error
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # the user's own frames are what helps
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return RewardError(
        reward.name, group.position, None, f"it raised {type(error).__name__}: {error}. Its traceback:\n{text}"
    )


def _close(values: Sequence[Any]) -> None:
    for value in values:
        if inspect.iscoroutine(value):
            value.close()


def _gather(pending: Mapping[int, Awaitable[Any]]) -> dict[int, tuple[Any, float]]:
    """Await all concurrently: {index: (value or exception, seconds)}. The caller may be in a loop (a notebook)."""

    async def timed(awaitable: Awaitable[Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        try:
            outcome: Any = await awaitable
        except (Exception, asyncio.CancelledError) as error:
            outcome = error
        return outcome, time.perf_counter() - start

    async def together() -> list[tuple[Any, float]]:
        return await asyncio.gather(*(timed(awaitable) for awaitable in pending.values()))

    if not pending:
        return {}
    outcomes = asyncio.run_coroutine_threadsafe(together(), _event_loop()).result()
    return dict(zip(pending, outcomes, strict=True))


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # One loop for the whole run, not one per group: HTTP clients that users keep between calls are bound to their loop.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="colograd-rewards", daemon=True).start()
    return loop


# -- what they return


def _checked(reward: RewardFunction, group: Group, values: Any) -> list[float]:
    """The [G] numbers a function returned, NaN for None."""
    size = len(group.rollouts)
    fail = functools.partial(RewardError, reward.name, group.position)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    if not isinstance(values, (list, tuple, np.ndarray)) or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise fail(None, f"it returned {_shown(values)}, but must return a list of {size} numbers, one per completion.")
    if len(values) != size:
        raise fail(
            None,
            f"it returned {len(values)} rewards for {size} completions: return exactly one per completion, and None "
            "where it has no opinion.",
        )
    numbers_G = []
    for index, value in enumerate(values):
        number = _number(value)
        if number is None:
            hint = " To abstain, return None." if _is_nan(value) else ""
            raise fail(index, f"its reward is {_shown(value)}, but must be a finite float32 number or None.{hint}")
        numbers_G.append(number)
    return numbers_G


def _number(value: Any) -> float | None:
    """The value as a finite number, NaN for None (an abstention), None for what can't be a reward."""
    if value is None:
        return math.nan
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= FLOAT32_MAX else None  # false for NaN too


def _is_nan(value: Any) -> bool:
    try:
        return bool(value != value)
    except (TypeError, ValueError, RuntimeError):
        return False


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def weighted_sum(rewards: torch.Tensor, weights: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """[G, R] rewards and R weights -> [G] float32: the sum over the functions that didn't abstain, NaN if all did."""
    weights_R = torch.as_tensor(weights, dtype=torch.float32, device=rewards.device)
    total = (rewards * weights_R).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.full_like(total, math.nan), total)
