"""Rewards of a group -> advantages."""

from __future__ import annotations

import torch

# TRL's constant: keeps a group of nearly equal rewards from being blown up.
STD_EPSILON = 1e-4


def group_advantages(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    """How much better each completion did than its group.

    GRPO's advantage (DeepSeekMath, arXiv 2402.03300, eq. in 4.1.1): (r - mean) / (std + 1e-4); with ``scale="none"``
    the division is left out (Dr. GRPO, arXiv 2503.20783). A completion that no reward function judged (NaN) doesn't
    enter the statistics and gets 0. Computed in float64, where the mean of equal float32 rewards is exactly that
    reward: a group without a difference gets exactly 0.

    Args:
        rewards: [G] float32, NaN where every function abstained.
        scale: "group" or "none".

    Returns:
        [G] float32.
    """
    exact = rewards.double()
    judged = ~exact.isnan()
    if not judged.any():
        return torch.zeros_like(rewards)
    advantages = exact - exact[judged].mean()
    if scale == "group":
        advantages = advantages / (group_std(exact) + STD_EPSILON)
    return torch.where(judged, advantages, 0.0).to(rewards.dtype)


def group_std(rewards: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation (n - 1) of the judged rewards; 0 for fewer than two. Returns a () tensor."""
    judged = rewards[~rewards.isnan()].double()
    deviation = judged.std() if len(judged) > 1 else judged.new_zeros(())
    return deviation.to(rewards.dtype)
