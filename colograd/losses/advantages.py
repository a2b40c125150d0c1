"""Advantages of a group's completions from their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..batch import SampledStep, ScoredGroup
from ..config import GRPOConfig
from ..parallel.ranks import gather
from ..rewards import weighted_sum

STD_EPSILON = 1e-4  # TRL's constant. It limits the advantages of a group of nearly equal rewards.
CANCELLED = 1e-6  # If no sum of normalised rewards is above this x the sum of absolute weights, all are set to 0.


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """Converts rewards to advantages by a run's settings.

    TRL lacks `advantage_baseline` and the scales `mean` and `batch_centered`."""

    scale: str  # `scale_rewards`: group, batch, batch_centered, mean or none.
    aggregation: str  # `multi_objective_aggregation`: sum_then_normalize or normalize_then_sum.
    baseline: str  # `advantage_baseline`: mean or leave_one_out.
    weights: tuple[float, ...]  # Weights of the R reward functions.

    @classmethod
    def of(cls, config: GRPOConfig, weights: Sequence[float]) -> AdvantageEstimator:
        return cls(config.scale_rewards, config.multi_objective_aggregation, config.advantage_baseline, tuple(weights))

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        """Convert one group's rewards [G, R] to advantages [G], which `scale_over_steps` may divide later."""
        if self.aggregation == "normalize_then_sum":
            return normalized_sum(rewards, self.weights)
        return group_advantages(weighted_sum(rewards, self.weights), self.scale, self.baseline)

    @property
    def step_scores(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function from a group's rewards [G, R] to scores [G], NaN where all reward functions abstained.

        A step's advantages are divided by the standard deviation of the step's scores. None: no division."""
        if self.aggregation == "normalize_then_sum":
            return lambda r: torch.where(r.isnan().all(dim=1), torch.nan, normalized_sum(r, self.weights))
        if self.scale == "batch_centered":
            return lambda rewards: centered(weighted_sum(rewards, self.weights))
        return (lambda rewards: weighted_sum(rewards, self.weights)) if self.scale == "batch" else None


def group_advantages(rewards: torch.Tensor, scale: str, baseline: str = "mean") -> torch.Tensor:
    """Compute each completion's advantage over its group: [G] float32 rewards -> [G] float32 advantages.

    Args:
        rewards: the rewards r. NaN gets the advantage 0. If fewer than two rewards aren't NaN, all advantages are 0.
        scale: "group": (r - mean) / (std + 1e-4), GRPO (DeepSeekMath, arXiv 2402.03300, eq. in 4.1.1). "mean":
            (r - mean) / mean for a positive mean (MaxRL, arXiv 2602.02710). Others: r - mean (Dr. GRPO, arXiv
            2503.20783).
        baseline: "leave_one_out" subtracts the mean of the group's other rewards from r (RLOO, arXiv 2402.14740). For
            n rewards that aren't NaN, the difference is (r - mean) * n / (n - 1).
    """
    exact = rewards.double()  # In float64 the mean of equal float32 rewards is exact: their advantages are exactly 0.
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
    """Subtract a group's mean from its rewards [G], as REINFORCE++-baseline (arXiv 2501.03262) does. NaN stays NaN."""
    exact = rewards.double()
    return (exact - exact.nanmean()).to(rewards.dtype)


def normalized_sum(rewards: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Normalise each function's rewards within the group, then sum them with weights (GDPO, arXiv 2601.05242).

    Rewards [G, R] float32 -> sums [G] float32. NaN adds 0. `step_std` does the paper's normalisation over the batch."""
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
    """Compute the sample standard deviation (divisor n - 1) of the rewards that aren't NaN, or 0 for fewer than two."""
    judged = rewards[~rewards.isnan()].double()
    deviation = judged.std() if len(judged) > 1 else judged.new_zeros(())
    return deviation.to(rewards.dtype)


def step_std(scores: Sequence[torch.Tensor]) -> float:
    """Compute the divisor of a step's advantages: 1e-4 plus the standard deviation of all ranks' scores. A collective.

    Args:
        scores: a tensor [G] for each group that this rank sampled and the step trains.
    """
    own = torch.cat(list(scores)).tolist() if scores else []
    return float(group_std(torch.tensor([x for part in gather(own) for x in part], dtype=torch.float64))) + STD_EPSILON


def scale_over_steps(steps: Sequence[SampledStep], estimator: AdvantageEstimator) -> list[SampledStep]:
    """Divide each step's advantages by its `step_std`, if the run's settings require that. A collective.

    A group that no step trains is only logged. Its divisor is the `step_std` of the step that it was sampled for."""
    scores = estimator.step_scores
    if scores is None:
        return list(steps)
    stds = [step_std([scores(group.rewards) for group in step.kept]) for step in steps]
    of_group = {group.group.position: std for step, std in zip(steps, stds, strict=True) for group in step.kept}

    def scaled(groups: Sequence[ScoredGroup], std: float) -> tuple[ScoredGroup, ...]:
        stds = [of_group.get(group.group.position, std) for group in groups]
        return tuple(dataclasses.replace(g, advantages=g.advantages / s) for g, s in zip(groups, stds, strict=True))

    return [
        dataclasses.replace(step, kept=scaled(step.kept, std), sampled=scaled(step.sampled, std))
        for step, std in zip(steps, stds, strict=True)
    ]
