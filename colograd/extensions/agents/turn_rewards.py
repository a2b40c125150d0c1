"""Rewards and advantages of single answers (turns) in an agent's session."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...batch import Group
from ...losses.advantages import AdvantageEstimator, group_advantages
from ...rewards import Ready
from ...rewards.calling import checked_values, value_error
from ...rewards.functions import RewardFunction
from ...rollout.stages import BeginScore, Stages

FAILURE = "agent_failure"  # Column of a rollout: why its session failed, or "".
SESSION = "session"  # Column of a rollout: a list with a dict per answer of the model.
JUDGED = "judged_turns"  # Column of a rollout: {name of a reward function: list with its reward for each answer}.
TURN_REWARDS = "turn_rewards"  # Column of a rollout: the program's reward for each answer.
WITHIN_GROUPS = ("group", "mean")  # Values of `scale_rewards` that divide by a statistic of the group's own rewards.
LARGEST = torch.finfo(torch.float32).max


def _rule_broken(values: Any, answers: int) -> str:
    """Return "" if ``values`` are one finite number per answer, else an error text that begins with ``values``."""
    fine = isinstance(values, Sequence) and len(values) == answers
    if fine and all(isinstance(each, numbers.Real) and abs(each) <= LARGEST for each in values):
        return ""
    return (
        f"{reprlib.repr(values)}, but must be a list of finite numbers, one for each of the {answers} answers to the "
        "session, in the order of the answers (a request with `n` has n answers)."
    )


def problem_with(columns: Mapping[str, Any], answers: int) -> str:
    values = columns.get(TURN_REWARDS)
    broken = "" if values is None else _rule_broken(values, answers)
    return broken and f"its turn_rewards are {broken}"


def checked_turns(reward: RewardFunction, groups: Sequence[Group], values: Any) -> list[float]:
    """Check a reward function's values like `checked_values`. A session's value may be a list with one reward per
    answer. Such a list goes into the column `JUDGED`, and its mean (None if empty) becomes the session's reward."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    is_list = isinstance(values, (list, tuple)) or (isinstance(values, np.ndarray) and values.ndim > 0)
    if not is_list or len(values) != len(rollouts):
        return checked_values(reward, groups, values)
    whole, turns = [*values], dict[int, list[float]]()
    for index, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            continue
        answers = rollout.columns.get(SESSION)
        if not isinstance(answers, list | tuple) or not all(isinstance(each, Mapping) for each in answers):
            problem = (
                f"its reward is {reprlib.repr(value)} ({type(values[index]).__name__}), but only an agent's session "
                "can have one reward per answer: return one number per completion."
            )
            raise value_error(reward, groups, problem, index)
        if broken := _rule_broken(value, len(answers)):
            raise value_error(reward, groups, f"its turn rewards are {broken}", index)
        turns[index] = [float(each) for each in value]
        whole[index] = sum(turns[index]) / len(value) if len(value) else None
    checked = checked_values(reward, groups, whole)
    for index, of_turns in turns.items():
        rollouts[index].columns[JUDGED][reward.name] = of_turns
    return checked


def with_turn_rewards(
    advantages: torch.Tensor, group: Group, estimator: AdvantageEstimator, weights: Mapping[str, float]
) -> torch.Tensor:
    """Add the advantages of single answers to a group's advantages.

    The program (with weight 1) and each reward function may return a reward per answer. An answer's total is the
    weighted sum of its rewards. An answer's advantage compares its total with the totals of all answers in the group.

    Args:
        advantages: [G], one advantage per session.
        weights: weight by name of a reward function.

    Returns:
        [all completion tokens], one advantage each. If no answer has a reward, or a session failed: ``advantages``.
    """
    of_sessions: list[list[float]] = []  # Per session: one total per answer, or an empty list.
    for rollout in group.rollouts:
        parts = [(1.0, rollout.columns.get(TURN_REWARDS) or ())]
        parts += [(weights.get(name, 1.0), turns) for name, turns in rollout.columns.get(JUDGED, {}).items()]
        scaled = [[weight * float(each) for each in turns] for weight, turns in parts if turns]
        of_sessions.append([sum(each) for each in zip(*scaled, strict=True)])
    if not any(of_sessions) or has_failed(group):
        return advantages
    scale = estimator.scale if estimator.scale in WITHIN_GROUPS else "none"
    rewards = torch.tensor([each for of_session in of_sessions for each in of_session])
    of_turns = iter(group_advantages(rewards, scale, estimator.baseline).tolist())
    per_token = []
    for rollout, of_session, advantage in zip(group.rollouts, of_sessions, advantages, strict=True):
        tokens = advantage.repeat(len(rollout.completion_ids))
        for turn in rollout.columns[SESSION] if of_session else ():
            tokens[turn["at"] : turn["at"] + turn["tokens"]] += next(of_turns)
        per_token.append(tokens)
    return torch.cat(per_token)


def agent_stages(sampler: Any) -> Callable[[Stages], Stages] | None:
    if not getattr(sampler.source, "may_fail", False):
        return None
    functions, sampler.scorer.check = len(sampler.scorer.rewards), checked_turns
    return lambda stages: dataclasses.replace(
        stages, begin_score=functools.partial(Judging, stages.begin_score, functions)
    )


def has_failed(group: Group) -> bool:
    return any(rollout.columns.get(FAILURE) for rollout in group.rollouts)


class Judging:
    """`PendingRewards` that don't call reward functions for groups with a failed session. Such groups get NaN."""

    def __init__(self, begin: BeginScore, functions: int, groups: Sequence[Group]) -> None:
        self._columns: list[Any] = [rollout.columns for group in groups for rollout in group.rollouts]
        for columns in self._columns:
            columns[JUDGED] = {}  # Copies of a rollout share this dict: `checked_turns` gets copies.
        self._judged = torch.tensor([not has_failed(group) for group in groups for _ in group.rollouts])
        self._rewards = torch.full((len(self._judged), functions), torch.nan)
        whole = [group for group in groups if not has_failed(group)]
        self._pending = begin(whole) if whole else Ready(self._rewards[:0])
        self.done, self.cancel = self._pending.done, self._pending.cancel

    def result(self) -> torch.Tensor:
        rewards = self._rewards.masked_scatter(self._judged[:, None], self._pending.result())
        for columns in self._columns:
            if columns.get(JUDGED) == {}:
                del columns[JUDGED]
        return rewards
