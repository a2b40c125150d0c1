"""Rewards of single answers: `turn_rewards`, which an agent's program returns beside the session's reward."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..batch import Group
from ..losses.advantages import AdvantageEstimator, group_advantages
from ..rollout.failures import has_failed

TURN_REWARDS, SESSION = "turn_rewards", "session"  # columns of a rollout
WITHIN_GROUPS = ("group", "mean")  # scales that divide a group's advantages; others divide over the step, or not at all


def problem_with(columns: Mapping[str, Any], answers: int) -> str:
    """What is wrong with a session's ``turn_rewards``; empty: nothing, or there are none."""
    given = columns.get(TURN_REWARDS)
    if given is None:
        return ""
    fine = isinstance(given, Sequence) and len(given) == answers
    if not fine or not all(isinstance(each, numbers.Real) and math.isfinite(each) for each in given):
        return (
            f"its turn_rewards are {reprlib.repr(given)}, but must be a list of finite numbers, one for each of its "
            f"{answers} answers in the order in which they came (of `n` answers to a request, one each)."
        )
    return ""


def with_turn_rewards(advantages: torch.Tensor, group: Group, estimator: AdvantageEstimator) -> torch.Tensor:
    """Add to a group's advantages those of its single answers: how much better each was rewarded than all of the group.

    Args:
        advantages: [G], of the sessions.

    Returns:
        [sum C], or ``advantages`` where no session has turn rewards, or one has failed.
    """
    given = [rollout.columns.get(TURN_REWARDS) or () for rollout in group.rollouts]
    if not any(given) or has_failed(group):
        return advantages
    rewards = torch.tensor([float(each) for of_session in given for each in of_session])
    scale = estimator.scale if estimator.scale in WITHIN_GROUPS else "none"
    own = iter(group_advantages(rewards, scale, estimator.baseline).tolist())
    found = []
    for rollout, of_session, advantage in zip(group.rollouts, given, advantages, strict=True):
        tokens = advantage.repeat(len(rollout.completion_ids))
        for turn, _ in zip(rollout.columns[SESSION], of_session, strict=True):
            tokens[turn["at"] : turn["at"] + turn["tokens"]] += next(own)
        found.append(tokens)
    return torch.cat(found)
