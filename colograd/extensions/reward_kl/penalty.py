"""KL penalty in the reward (`kl_in_reward`): beta times an estimate of KL(pi, reference) is subtracted from it.

    r_i - beta * sum over the completion's sampled tokens of k(log pi, log reference)

The group's baseline and scale see this reward, as in verl (`use_kl_in_reward`), where a penalty per token is summed
before GRPO's advantages. (OpenRLHF subtracts it after them.) The log-probabilities of pi are the sampler's, as in
verl's bypass mode; a token without one adds 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import MicroBatch, RolloutId, ScoredGroup, StepBatch
from ...config import GRPOConfig
from ...losses.advantages import AdvantageEstimator, group_advantages
from ...losses.terms import LossTerm
from ...losses.tokens import Means
from ...policy.packing import advantages_of, places
from ...rewards import weighted_sum


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Compute e^-d + d - 1 with verl's bounds: d within +-20, the result within +-10."""
    bounded = (-difference).clamp(-20.0, 20.0)
    return (bounded.exp() - bounded - 1).clamp(-10.0, 10.0)


# Estimators of KL(pi, reference) from log pi - log reference of a token; http://joschu.net/blog/kl-approx.html.
ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": k3,
}


@dataclass(frozen=True, slots=True)
class RewardPenalty(LossTerm):
    """The penalty of a run."""

    coefficient: float
    estimator: str

    needs = ("ref_logprobs",)
    waits = "kl_in_reward changes the advantages after all groups are sampled"

    def of_tokens_of(self, sampler: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Estimate the divergence at each token; 0 where the sampler gave no log-probability (NaN)."""
        return ESTIMATORS[self.estimator]((sampler - reference).nan_to_num(nan=0.0))

    def with_scores(self, step: StepBatch, estimator: AdvantageEstimator) -> StepBatch:
        sums: dict[RolloutId, float] = {}  # of each completion, over its sampled tokens
        for row in step.rows:
            assert row.ref_logprobs is not None, "the reference has read every row"
            rollouts = [rollout for part in row.parts for rollout in part.rollouts]
            sampler = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
            tokens = self.of_tokens_of(sampler.double(), row.ref_logprobs.double().cpu())
            tokens = tokens * torch.cat([rollout.sampled for rollout in rollouts])
            sums |= {identity: float(tokens[place].sum()) for identity, place in places(row)}
        groups = tuple(self._penalised(scored, sums, estimator) for scored in step.groups)
        advantages: dict[RolloutId, Any] = {}
        for scored in groups:
            advantages |= zip(scored.group.rollout_ids, advantages_of(scored), strict=True)

        def changed(part: Any) -> Any:
            return dataclasses.replace(part, advantages=tuple(map(advantages.get, part.ids, part.advantages)))

        rows = (dataclasses.replace(row, parts=tuple(map(changed, row.parts))) for row in step.rows)
        return dataclasses.replace(step, rows=tuple(rows), groups=groups)

    def _penalised(
        self, scored: ScoredGroup, known: Mapping[RolloutId, float], estimator: AdvantageEstimator
    ) -> ScoredGroup:
        if not torch.equal(scored.advantages, estimator.of_group(scored.rewards)):
            raise ValueError(
                f"kl_in_reward is {self.coefficient:g}, but the advantages aren't those of the rewards' group "
                "(a compute_advantages of your own, or one advantage per token): set beta instead."
            )
        rewards = weighted_sum(scored.rewards, estimator.weights).double()
        sums = torch.tensor([known[identity] for identity in scored.group.rollout_ids], dtype=torch.float64)
        penalised = (rewards - self.coefficient * sums).to(scored.rewards.dtype)
        advantages = group_advantages(penalised, estimator.scale, estimator.baseline)
        return dataclasses.replace(scored, advantages=advantages)

    @torch.no_grad()
    def observe(self, old: torch.Tensor, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Means:
        assert batch.ref_logprobs is not None
        tokens = self.of_tokens_of(batch.sampler_logprobs, batch.ref_logprobs)
        return {"kl_in_reward": (tokens.where(batch.loss_mask > 0, 0.0).sum(), batch.loss_mask.sum())}


def penalty_of(config: GRPOConfig, policy: Any) -> LossTerm | None:
    """Return the penalty of a run with `kl_in_reward`."""
    if config.kl_in_reward == 0:
        return None
    name = f"kl_in_reward is {config.kl_in_reward:g}"
    if config.kl_in_reward < 0:
        raise ValueError(f"{name}, but must be at least 0: it is subtracted from the rewards.")
    if config.kl_in_reward_estimator not in ESTIMATORS:
        raise ValueError(
            f"kl_in_reward_estimator is {config.kl_in_reward_estimator!r}, but must be one of {', '.join(ESTIMATORS)}."
        )
    if config.scale_rewards.startswith("batch") or config.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            f"{name}, but the advantages are divided by a deviation over the step, which is known before the penalty: "
            "set scale_rewards: group, mean or none, and multi_objective_aggregation: sum_then_normalize."
        )
    return RewardPenalty(config.kl_in_reward, config.kl_in_reward_estimator)
