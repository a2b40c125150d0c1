"""Scoring one group in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from colograd.batch import Group
from colograd.rewards import RewardFunction, Scorer


def score_group(
    functions: Sequence[RewardFunction], group: Group, completions: Sequence[str], trainer_state: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the rewards [G, R], and each function's seconds by name."""
    scorer = Scorer(functions)
    rewards = scorer.submit([group], [completions], trainer_state).result()
    return rewards, {reward.name: scorer.counts[f"rewards/{reward.name}/seconds"] for reward in functions}
