"""Advantages of single answers, from rewards that an agent's program or reward functions give to each answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...batch import Group
from ...losses.advantages import AdvantageEstimator, group_advantages
from .failures import has_failed
from .turns import JUDGED, SESSION, are_numbers, rule

TURN_REWARDS = "turn_rewards"  # the rollout's column with the program's reward for each answer
WITHIN_GROUPS = ("group", "mean")  # scales within a group; other scales work over the step, or don't divide


def problem_with(columns: Mapping[str, Any], answers: int) -> str:
    """Return the problem with a session's ``turn_rewards``, or "" if they are valid or missing."""
    given = columns.get(TURN_REWARDS)
    if given is None or are_numbers(given, answers):
        return ""
    return f"its turn_rewards are {rule(given, answers)}"


def rewards_of_answers(columns: Mapping[str, Any], weights: Mapping[str, float]) -> list[float]:
    """Return a reward per answer: the program's, plus the reward functions' times their weights. Empty: no rewards."""
    parts = [(1.0, columns.get(TURN_REWARDS) or ())]
    parts += [(weights.get(name, 1.0), turns) for name, turns in columns.get(JUDGED, {}).items()]
    scaled = [[weight * float(each) for each in turns] for weight, turns in parts if turns]
    return [sum(each) for each in zip(*scaled, strict=True)]


def with_turn_rewards(
    advantages: torch.Tensor, group: Group, estimator: AdvantageEstimator, weights: Mapping[str, float]
) -> torch.Tensor:
    """Add the advantages of single answers to a group's advantages.

    An answer's advantage is its reward relative to the rewards of all answers in the group.

    Args:
        advantages: [G], one per session.
        weights: name of a reward function -> weight.

    Returns:
        [sum C], one per completion token. ``advantages`` if no session has turn rewards, or a session has failed.
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
