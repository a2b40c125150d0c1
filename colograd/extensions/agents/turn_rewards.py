"""Rewards and advantages of single answers (turns) in an agent's session.

The program returns `turn_rewards`, or a reward function returns a list in place of one number for a session. A column
of the group's rollouts carries the rewards into the rollout log and to the advantages.

A group with a failed session gets no rewards: every reward function abstains, and the group isn't trained.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...batch import Group, Rollout
from ...losses.advantages import AdvantageEstimator, group_advantages
from ...rewards import Ready
from ...rewards.calling import PARTS as JUDGED
from ...rollout.stages import BeginScore, Stages

FAILURE = "agent_failure"  # Column of a rollout with the reason of a failure, or an empty text.
SESSION = "session"  # Column of a rollout with the agent's answers.
TURN_REWARDS = "turn_rewards"  # Column of a rollout with the program's reward for each answer.
WITHIN_GROUPS = ("group", "mean")  # Values of `scale_rewards` that divide within a group.
LARGEST = torch.finfo(torch.float32).max


def _rule_broken(values: Any, answers: int) -> str:
    """Return "" if ``values`` are finite float32 numbers, one per answer. Otherwise return the end of an error."""
    fine = isinstance(values, Sequence) and len(values) == answers
    if fine and all(isinstance(each, numbers.Real) and abs(each) <= LARGEST for each in values):
        return ""
    return (
        f"{reprlib.repr(values)}, but must be a list of finite numbers, one for each of its {answers} answers in the "
        "order in which they came (of `n` answers to a request, one each)."
    )


def problem_with(columns: Mapping[str, Any], answers: int) -> str:
    """Return the problem with a session's ``turn_rewards``, or "" if they are valid or missing."""
    values = columns.get(TURN_REWARDS)
    broken = "" if values is None else _rule_broken(values, answers)
    return broken and f"its turn_rewards are {broken}"


def split(values: Iterable[Any], rollouts: Sequence[Rollout]) -> tuple[list[Any], list[list[float] | None]]:
    """Return one number per session, and the rewards per answer or None. A list's number is the mean of the list."""
    whole, turns = list[Any](), list[list[float] | None]()
    for index, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        kind = type(value).__name__
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            whole.append(value)
            turns.append(None)
            continue
        answers = rollout.columns.get(SESSION)
        if not isinstance(answers, list | tuple) or not all(isinstance(each, Mapping) for each in answers):
            raise ValueError(
                index,
                f"its reward is {reprlib.repr(value)} ({kind}), but only an agent's session can have one reward per "
                "answer: return one number per completion.",
            )
        if broken := _rule_broken(value, len(answers)):
            raise ValueError(index, f"its turn rewards are {broken}")
        own = [float(each) for each in value]
        turns.append(own)
        whole.append(sum(own) / len(own) if own else None)
    return whole, turns


def with_turn_rewards(
    advantages: torch.Tensor, group: Group, estimator: AdvantageEstimator, weights: Mapping[str, float]
) -> torch.Tensor:
    """Add the advantages of single answers to a group's advantages.

    An answer's reward is the program's reward plus the weighted rewards of reward functions. An answer's advantage
    compares its reward with the rewards of all answers in the group.

    Args:
        advantages: [G], one advantage per session.
        weights: weight by name of a reward function.

    Returns:
        [sum C], one advantage per completion token. ``advantages`` itself without turn rewards or if a session failed.
    """
    of_sessions: list[list[float]] = []  # per session one reward per answer, or an empty list
    for rollout in group.rollouts:
        parts = [(1.0, rollout.columns.get(TURN_REWARDS) or ())]
        parts += [(weights.get(name, 1.0), turns) for name, turns in rollout.columns.get(JUDGED, {}).items()]
        scaled = [[weight * float(each) for each in turns] for weight, turns in parts if turns]
        of_sessions.append([sum(each) for each in zip(*scaled, strict=True)])
    if not any(of_sessions) or has_failed(group):
        return advantages
    scale = estimator.scale if estimator.scale in WITHIN_GROUPS else "none"
    rewards = torch.tensor([each for of_session in of_sessions for each in of_session])
    own = iter(group_advantages(rewards, scale, estimator.baseline).tolist())
    per_token = []
    for rollout, of_session, advantage in zip(group.rollouts, of_sessions, advantages, strict=True):
        tokens = advantage.repeat(len(rollout.completion_ids))
        for turn in rollout.columns[SESSION] if of_session else ():
            tokens[turn["at"] : turn["at"] + turn["tokens"]] += next(own)
        per_token.append(tokens)
    return torch.cat(per_token)


def agent_stages(sampler: Any) -> Callable[[Stages], Stages] | None:
    """Return a function that changes agents' stages: failed groups abstain, and answers may have rewards, or None."""

    def change(stages: Stages) -> Stages:
        begin_score = functools.partial(Abstaining, stages.begin_score, len(sampler.scorer.rewards))
        return dataclasses.replace(stages, begin_score=begin_score, take_turns=sampler.scorer.take_turns)

    return change if getattr(sampler.source, "may_fail", False) else None


def has_failed(group: Group) -> bool:
    return any(rollout.columns.get(FAILURE) for rollout in group.rollouts)


class Abstaining:
    """`PendingRewards` of agents' groups. Failed groups get NaN, and reward functions aren't called for them.

    Args:
        begin: starts to score the groups that didn't fail.
        functions: R, the number of reward functions.
    """

    def __init__(self, begin: BeginScore, functions: int, groups: Sequence[Group]) -> None:
        self._judged = torch.tensor([not has_failed(group) for group in groups for _ in group.rollouts])
        self._rewards = torch.full((len(self._judged), functions), torch.nan)
        whole = [group for group in groups if not has_failed(group)]
        self._pending = begin(whole) if whole else Ready(self._rewards[:0])
        self.done, self.cancel = self._pending.done, self._pending.cancel

    def result(self) -> torch.Tensor:
        return self._rewards.masked_scatter(self._judged[:, None], self._pending.result())
