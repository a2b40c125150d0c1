"""Rewards of an agent's single answers. A reward function may return them in place of one number for a session.

A column of the group's rollouts carries them into the journal and to the advantages.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...batch import Rollout

SESSION = "session"  # the rollout's column with an agent's answers
LARGEST = torch.finfo(torch.float32).max

Turns = list[float] | None  # a reward per answer of a completion; None: the completion has one reward


def answers_in(rollout: Rollout) -> int | None:
    """Return the number of a session's answers, or None if the rollout isn't a session."""
    answers = rollout.columns.get(SESSION)
    if not isinstance(answers, list | tuple) or not all(isinstance(each, Mapping) for each in answers):
        return None
    return len(answers)


def are_numbers(values: Any, count: int) -> bool:
    """Return whether ``values`` are ``count`` finite float32 numbers."""
    fine = isinstance(values, Sequence) and len(values) == count
    return fine and all(isinstance(each, numbers.Real) and abs(each) <= LARGEST for each in values)


def rule(values: Any, answers: int) -> str:
    """Return the end of an error: the values, and the rule for rewards of ``answers`` answers."""
    return (
        f"{reprlib.repr(values)}, but must be a list of finite numbers, one for each of its {answers} answers in the "
        "order in which they came (of `n` answers to a request, one each)."
    )


def split(values: Iterable[Any], rollouts: Sequence[Rollout]) -> tuple[list[Any], list[Turns]]:
    """Implement the seam ``part_rewards`` (`rewards.calling`): the number in place of a list is its mean."""
    whole, turns = list[Any](), list[Turns]()
    for index, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        kind = type(value).__name__
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            whole.append(value)
            turns.append(None)
            continue
        count = answers_in(rollout)
        if count is None:
            raise ValueError(
                index,
                f"its reward is {reprlib.repr(value)} ({kind}), but only an agent's answers have a reward "
                "each: return a number for the completion.",
            )
        if not are_numbers(value, count):
            raise ValueError(index, f"its turn rewards are {rule(value, count)}")
        own = [float(each) for each in value]
        turns.append(own)
        whole.append(sum(own) / count if count else None)
    return whole, turns
