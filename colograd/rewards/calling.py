"""The keyword arguments of one call of a reward function, and checks of the rewards that it returns."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..batch import Group
from ..usercode.calls import place_of
from ..usercode.untrusted import own_copy
from ..usercode.worker_process import PER_TOKEN, CallLog
from .functions import RewardError, RewardFunction

RESERVED = (
    "prompt", "prompts", "prompt_texts", "completions", "completion_ids", "completion_mask", "trainer_state",
    "log_extra", "log_metric",
)  # fmt: skip
Texts = Sequence[Sequence[str]]
FLOAT32_MAX = torch.finfo(torch.float32).max


def keywords_for(
    reward: RewardFunction, groups: Sequence[Group], texts: Texts, trainer_state: Any, log: CallLog | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of one call, as copies that the function may change.

    ``log`` is None if a worker process makes the call. `Rollout.columns` override the dataset's columns."""
    columns = dict.fromkeys(name for group in groups for name in group.example if name not in RESERVED)
    own = dict.fromkeys(name for group in groups for rollout in group.rollouts for name in rollout.columns)
    shared = {"trainer_state": trainer_state, "log_extra": log and log.extra, "log_metric": log and log.metric}
    names = dict.fromkeys(("prompts", "completions", *PER_TOKEN, *columns, *own, *shared))
    parameters = parameters_of(reward.function)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = {name: None for name in names if name in parameters}
    keywords: dict[str, Any] = {name: shared.get(name, []) for name in names}
    for group, of_group in zip(groups, texts, strict=True):
        prompt = group.example["prompt"]
        for rollout, text in zip(group.rollouts, of_group, strict=True):
            messages = [*rollout.messages] or [{"role": "assistant", "content": text}]
            completion = messages if isinstance(prompt, list) else text
            row = {**group.example, "prompts": prompt, "completions": completion, **rollout.columns}
            # Lists are larger to send, so workers get token ids as an array and the mask as bytes, and make the lists.
            if "completion_ids" in names:
                row["completion_ids"] = list(rollout.completion_ids) if log is not None else rollout.completion_ids
            if "completion_mask" in names:  # Per token: 1 if the model wrote it.
                mask = rollout.sampled.to(torch.uint8)
                row["completion_mask"] = mask.tolist() if log is not None else mask.numpy().tobytes()
            for name in names.keys() - shared:
                keywords[name].append(own_copy(row.get(name)))
    if problem := _lacking(reward, keywords, groups[0].example):
        raise RewardError(reward.name, groups[0].position, None, problem)
    return keywords


def check_columns_for(rewards: Sequence[RewardFunction], columns: Sequence[str]) -> None:
    for reward in rewards:
        if problem := _lacking(reward, {*RESERVED, *columns} - {"prompt"}, columns):
            raise ValueError(f"reward function {reward.name!r}: {problem}")


def _lacking(reward: RewardFunction, given: Container[str], columns: Iterable[str]) -> str:
    missing = [
        p.name
        for p in parameters_of(reward.function).values()
        if p.name not in given and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if not missing:
        return ""
    near = difflib.get_close_matches(missing[0], list(columns), n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    place = place_of(reward.function)
    return (
        f"it needs {', '.join(map(repr, missing))}{f' ({place})' if place else ''}, but the dataset has the columns "
        f"{', '.join(map(repr, columns))}: add the column to the dataset, or give the parameter a default.{meant}"
    )


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters. If the signature can't be read, return ``**kwargs``, which takes all keywords."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return inspect.signature(lambda **kwargs: None).parameters


def value_error(
    reward: RewardFunction, groups: Sequence[Group], problem: str, completion: int | None = None
) -> RewardError:
    if place := place_of(reward.function):
        problem += f" The function begins at {place}."
    return RewardError(reward.name, groups[0].position, completion, problem)


def checked_values(reward: RewardFunction, groups: Sequence[Group], values: Any) -> list[float]:
    """Return a number per completion, with NaN in the place of None. Raise `RewardError` for a wrong value."""
    size = sum(len(group.rollouts) for group in groups)
    fail = functools.partial(value_error, reward, groups)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    if not isinstance(values, (list, tuple, np.ndarray)) or (isinstance(values, np.ndarray) and values.ndim == 0):
        rule = f"a reward function must return a list of {size} numbers, one per completion"
        raise fail(f"it returned {reprlib.repr(values)} ({type(values).__name__}), but {rule}.")
    if len(values) != size:
        rule = "must return exactly one number per completion, or None for a completion that it doesn't score"
        raise fail(f"it returned {len(values)} rewards for {size} completions, but {rule}.")
    numbers_G = []
    for index, value in enumerate(values):
        number = value.item() if isinstance(value, np.generic | torch.Tensor) and value.ndim == 0 else value
        number = math.nan if value is None else number
        # The comparison is False for NaN, so NaN isn't a valid reward.
        if value is not None and not (isinstance(number, numbers.Real) and abs(number) <= FLOAT32_MAX):
            is_nan = isinstance(number, numbers.Real) and bool(number != number)
            problem = f"its reward is {reprlib.repr(value)} ({type(value).__name__}), but a reward must be a finite "
            raise fail(f"{problem}float32 number or None.{' To abstain, return None.' if is_nan else ''}", index)
        numbers_G.append(float(number))
    return numbers_G
