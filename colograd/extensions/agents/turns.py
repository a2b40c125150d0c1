"""Rewards of an agent's single answers. A reward function may return them in place of one number for a session.

A column of the group's rollouts carries them into the journal and to the advantages.
"""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...batch import Group, Rollout

SESSION = "session"  # the rollout's column with an agent's answers
JUDGED = "judged_turns"  # the rollout's column with name of a reward function -> a reward per answer
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


def split_turns(values: Iterable[Any], answers: Sequence[int | None]) -> tuple[list[Any], list[Turns]]:
    """Return a function's values with the mean in place of each list, and the lists.

    Args:
        answers: number of answers of each completion, see `answers_in`.

    Raises:
        ValueError: a list can't be the rewards of a session's answers. Its first argument is the completion's index.
    """
    whole, turns = list[Any](), list[Turns]()
    for index, (value, count) in enumerate(zip(values, answers, strict=True)):
        kind = type(value).__name__
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            whole.append(value)
            turns.append(None)
            continue
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


def with_judged_turns(group: Group, judged: Mapping[str, Sequence[Turns]]) -> Group:
    """Return the group with rewards of its sessions' answers, by the function's name. Earlier ones are removed."""
    if not judged and not any(JUDGED in rollout.columns for rollout in group.rollouts):
        return group
    rollouts = []
    for index, rollout in enumerate(group.rollouts):
        columns = {name: value for name, value in rollout.columns.items() if name != JUDGED}
        if own := {name: turns for name, of_all in judged.items() if (turns := of_all[index]) is not None}:
            columns[JUDGED] = own
        rollouts.append(dataclasses.replace(rollout, columns=columns))
    return dataclasses.replace(group, rollouts=tuple(rollouts))
