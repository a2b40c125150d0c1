"""Advantages of single answers, by the rewards that an agent's program or reward functions give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..batch import Group
from ..losses.advantages import AdvantageEstimator, group_advantages
from ..rewards.turns import JUDGED, SESSION, are_numbers, rule
from ..rollout.failures import has_failed

TURN_REWARDS = "turn_rewards"  # a rollout's column: of its answers, by the program
WITHIN_GROUPS = ("group", "mean")  # scales that divide a group's advantages; others divide over the step, or not at all


def problem_with(columns: Mapping[str, Any], answers: int) -> str:
    """What is wrong with a session's ``turn_rewards``; empty: nothing, or there are none."""
    given = columns.get(TURN_REWARDS)
    if given is None or are_numbers(given, answers):
        return ""
    return f"its turn_rewards are {rule(given, answers)}"


def rewards_of_answers(columns: Mapping[str, Any], weights: Mapping[str, float]) -> list[float]:
    """Of each answer of a session: what the program gave it, and reward functions by their weights; empty: nothing."""
    parts = [(1.0, columns.get(TURN_REWARDS) or ())]
    parts += [(weights.get(name, 1.0), turns) for name, turns in columns.get(JUDGED, {}).items()]
    scaled = [[weight * float(each) for each in turns] for weight, turns in parts if turns]
    return [sum(each) for each in zip(*scaled, strict=True)]


def with_turn_rewards(
    advantages: torch.Tensor, group: Group, estimator: AdvantageEstimator, weights: Mapping[str, float]
) -> torch.Tensor:
    """Add to a group's advantages those of its single answers: how much better each was rewarded than all of the group.

    Args:
        advantages: [G], of the sessions.
        weights: of the reward functions, by their names.

    Returns:
        [sum C], or ``advantages`` where no session has turn rewards, or one has failed.
    """
    given = [rewards_of_answers(rollout.columns, weights) for rollout in group.rollouts]
    if not any(given) or has_failed(group):
        return advantages
    rewards = torch.tensor([each for of_session in given for each in of_session])
    scale = estimator.scale if estimator.scale in WITHIN_GROUPS else "none"
    own = iter(group_advantages(rewards, scale, estimator.baseline).tolist())
    found = []
    for rollout, of_session, advantage in zip(group.rollouts, given, advantages, strict=True):
        tokens = advantage.repeat(len(rollout.completion_ids))
        answers = rollout.columns[SESSION] if of_session else ()
        for turn, _ in zip(answers, of_session, strict=True):
            tokens[turn["at"] : turn["at"] + turn["tokens"]] += next(own)
        found.append(tokens)
    return torch.cat(found)
