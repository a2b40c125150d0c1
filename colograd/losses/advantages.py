"""Advantages from the rewards of a group, and their scaling over the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..batch import SampledStep, ScoredGroup
from ..config import GRPOConfig
from ..parallel.ranks import gather
from ..rewards import weighted_sum

# TRL's constant: keeps a group of nearly equal rewards from being blown up.
STD_EPSILON = 1e-4
# Float32 normalised rewards that cancel leave rounding errors: sums up to this times the weights' sum count as 0.
CANCELLED = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """The computation of advantages from a run's rewards. Its settings are TRL's, except for the baseline.

    `scale_rewards: batch` and `normalize_then_sum` also divide by one positive number for all groups (`step_std`).
    """

    scale: str  # group, batch, batch_centered, mean or none
    aggregation: str  # sum_then_normalize or normalize_then_sum
    baseline: str  # mean or leave_one_out
    weights: tuple[float, ...]  # [R], one weight per reward function

    @classmethod
    def of(cls, config: GRPOConfig, weights: Sequence[float]) -> AdvantageEstimator:
        return cls(config.scale_rewards, config.multi_objective_aggregation, config.advantage_baseline, tuple(weights))

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        """Convert a group's [G, R] rewards (NaN: a function abstained) into [G] advantages, before `step_std`."""
        if self.aggregation == "normalize_then_sum":
            return normalized_sum(rewards, self.weights)
        return group_advantages(weighted_sum(rewards, self.weights), self.scale, self.baseline)

    @property
    def step_scores(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The function from a group's [G, R] rewards to its [G] scores (NaN: unjudged); None: no scaling over the step.
        Advantages are divided by the standard deviation of the scores of a whole step (`step_std`)."""
        if self.aggregation == "normalize_then_sum":
            return lambda r: torch.where(r.isnan().all(dim=1), torch.nan, normalized_sum(r, self.weights))
        if self.scale == "batch_centered":
            return lambda rewards: centered(weighted_sum(rewards, self.weights))
        return (lambda rewards: weighted_sum(rewards, self.weights)) if self.scale == "batch" else None


def group_advantages(rewards: torch.Tensor, scale: str, baseline: str = "mean") -> torch.Tensor:
    """Compute each completion's advantage over its group: [G] float32 rewards -> [G] float32 advantages.

    GRPO's advantage (DeepSeekMath, arXiv 2402.03300, eq. in 4.1.1): (r - mean) / (std + 1e-4). The ``scale`` "mean"
    divides by the mean, if it is positive: a prompt's objective is then the log-likelihood of a success instead of its
    probability (MaxRL, arXiv 2602.02710). Any other scale divides nothing here (Dr. GRPO, arXiv 2503.20783). The
    baseline "leave_one_out" is the mean of the other rewards (RLOO, arXiv 2402.14740). A reward is n / (n - 1) times
    as far from it as from the mean of all n judged rewards. An unjudged completion (NaN), or the only judged one, gets
    0. In float64 the mean of equal float32 rewards is exactly that reward: without a difference a group gets exactly 0.
    """
    exact = rewards.double()
    judged = ~exact.isnan()
    count = int(judged.sum())
    if count < 2:
        return torch.zeros_like(rewards)
    mean = exact[judged].mean()
    advantages = exact - mean
    if baseline == "leave_one_out":
        advantages = advantages * (count / (count - 1))
    if scale == "group":
        advantages = advantages / (group_std(exact) + STD_EPSILON)
    elif scale == "mean" and mean > 0:
        advantages = advantages / mean
    return torch.where(judged, advantages, 0.0).to(rewards.dtype)


def centered(rewards: torch.Tensor) -> torch.Tensor:
    """Subtract the mean from [G] rewards; NaN stays. REINFORCE++-baseline (arXiv 2501.03262) divides by the results'
    deviation over the step, which doesn't depend on the groups' means."""
    exact = rewards.double()
    return (exact - exact.nanmean()).to(rewards.dtype)


def normalized_sum(rewards: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Normalise each function's rewards within the group, then weigh and sum them (GDPO, arXiv 2601.05242): [G, R]
    float32 rewards -> [G] float32. NaN, where a function abstains, adds 0. The paper also normalises the sums over the
    batch. Their mean is 0 in each group, so that is a division (`step_std`)."""
    exact = rewards.double()
    total = exact.new_zeros(len(exact))
    for column, weight in zip(exact.unbind(1), weights, strict=True):
        judged = ~column.isnan()
        if judged.any():
            normal = (column - column[judged].mean()) / (group_std(column) + STD_EPSILON)
            total += weight * torch.where(judged, normal, 0.0)
    if total.abs().max() <= CANCELLED * sum(map(abs, weights)):
        total.zero_()
    return total.to(rewards.dtype)


def group_std(rewards: torch.Tensor) -> torch.Tensor:
    """Compute the sample standard deviation (n - 1) of the judged rewards; 0 for fewer than two. Returns a ()
    tensor."""
    judged = rewards[~rewards.isnan()].double()
    deviation = judged.std() if len(judged) > 1 else judged.new_zeros(())
    return deviation.to(rewards.dtype)


def step_std(scores: Sequence[torch.Tensor]) -> float:
    """Compute the divisor of a step's advantages: the deviation, over all ranks, of the kept groups' scores ([G] each),
    plus 1e-4. A collective, the only one between sampling and training."""
    own = torch.cat(list(scores)).tolist() if scores else []
    return float(group_std(torch.tensor([x for part in gather(own) for x in part], dtype=torch.float64))) + STD_EPSILON


def divided(group: ScoredGroup, std: float) -> ScoredGroup:
    """Divide the group's advantages, one per completion or per token, by ``std``."""
    return dataclasses.replace(group, advantages=group.advantages / std)


def scale_over_steps(steps: Sequence[SampledStep], estimator: AdvantageEstimator) -> list[SampledStep]:
    """Divide the steps' advantages by a deviation over the step, if the run scales them so. A group that isn't kept is
    divided by the deviation of the step that counts it. A collective."""
    scores = estimator.step_scores
    if scores is None:
        return list(steps)
    stds = [step_std([scores(group.rewards) for group in step.kept]) for step in steps]
    of_group = {group.group.position: std for step, std in zip(steps, stds, strict=True) for group in step.kept}

    def scaled(groups: Sequence[ScoredGroup], std: float) -> tuple[ScoredGroup, ...]:
        return tuple(divided(group, of_group.get(group.group.position, std)) for group in groups)

    return [
        dataclasses.replace(step, kept=scaled(step.kept, std), sampled=scaled(step.sampled, std))
        for step, std in zip(steps, stds, strict=True)
    ]
