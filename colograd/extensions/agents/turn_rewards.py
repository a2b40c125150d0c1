"""Rewards and advantages of an agent's single answers.

The program returns `turn_rewards`, or a reward function returns a list in place of one number for a session. A column
of the group's rollouts carries these into the journal and to the advantages.

Groups with a failed rollout get no rewards: every reward function abstains, and they aren't trained on.
"""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...batch import Group, Rollout
from ...losses.advantages import AdvantageEstimator, group_advantages
from ...rewards.calling import PARTS as JUDGED
from ...rollout.stages import BeginScore, PendingRewards, Stages

FAILURE = "agent_failure"  # the rollout's column with the reason of its failure; empty: none
SESSION = "session"  # the rollout's column with an agent's answers
TURN_REWARDS = "turn_rewards"  # the rollout's column with the program's reward for each answer
WITHIN_GROUPS = ("group", "mean")  # scales within a group; other scales work over the step, or don't divide
LARGEST = torch.finfo(torch.float32).max


def _rule_broken(values: Any, answers: int) -> str:
    """Return the end of an error if ``values`` aren't a finite float32 number for each of the answers, else ""."""
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
    """Implement the seam ``part_rewards`` (`rewards.calling`): the number in place of a list is its mean."""
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
                f"its reward is {reprlib.repr(value)} ({kind}), but only an agent's answers have a reward "
                "each: return a number for the completion.",
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

    An answer's reward is the program's, plus the reward functions' times their weights. Its advantage is relative to
    the rewards of all answers in the group.

    Args:
        advantages: [G], one per session.
        weights: name of a reward function -> weight.

    Returns:
        [sum C], one per completion token. ``advantages`` if no session has turn rewards, or a session has failed.
    """
    of_sessions: list[list[float]] = []  # per session a reward per answer, or nothing
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
    """Return a function for a source of sessions: failed groups abstain, and single answers may have rewards."""
    if not getattr(sampler.source, "may_fail", False):
        return None

    def change(stages: Stages) -> Stages:
        def begin_score(groups: Sequence[Group]) -> PendingRewards:
            if any(map(has_failed, groups)):
                return Abstaining(groups, stages.begin_score, len(sampler.scorer.rewards))
            return stages.begin_score(groups)

        return dataclasses.replace(stages, begin_score=begin_score, take_turns=sampler.scorer.take_turns)

    return change


def has_failed(group: Group) -> bool:
    return any(rollout.columns.get(FAILURE) for rollout in group.rollouts)


class Abstaining:
    """`PendingRewards` of some groups. Failed groups get NaN, and no reward function sees them.

    Args:
        begin: begins to score the groups that didn't fail.
        functions: R, the number of reward functions.
    """

    def __init__(self, groups: Sequence[Group], begin: BeginScore, functions: int) -> None:
        self._groups, self._functions = groups, functions
        whole = [group for group in groups if not has_failed(group)]
        self._pending = begin(whole) if whole else None

    def done(self) -> bool:
        return self._pending is None or self._pending.done()

    def cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    def result(self) -> torch.Tensor:
        rewards = torch.full((sum(len(group.rollouts) for group in self._groups), self._functions), torch.nan)
        if self._pending is not None:
            judged = [not has_failed(group) for group in self._groups for _ in group.rollouts]
            rewards[torch.tensor(judged)] = self._pending.result()
        return rewards
