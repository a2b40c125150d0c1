"""KL penalty in the reward (setting `kl_in_reward`). The reward r of a completion, with beta = `kl_in_reward`, becomes

    r - beta * sum over the completion's sampled tokens of k(log pi, log reference)

k estimates KL(pi, reference model) at one token. As in verl (`use_kl_in_reward`), the group's mean and standard
deviation are computed from the changed rewards. log pi is the sampler's log-probability, as in verl's bypass mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import RolloutId, ScoredGroup, StepBatch
from ...config import GRPOConfig
from ...losses.advantages import AdvantageEstimator, group_advantages
from ...losses.objective import LossTerm
from ...losses.tokens import Means, Tokens
from ...policy.packing import advantages_of, places
from ...rewards import weighted_sum
from ...runtime import registry


def k3(difference: torch.Tensor) -> torch.Tensor:
    bounded = (-difference).clamp(-20.0, 20.0)  # as in verl, the log-ratio and k3 are bounded
    return (bounded.exp() - bounded - 1).clamp(-10.0, 10.0)


# Estimators of KL(pi, reference) at a token from log pi - log reference; http://joschu.net/blog/kl-approx.html.
ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": k3,
}


@dataclass(frozen=True, slots=True)
class RewardPenalty(LossTerm):
    coefficient: float
    estimator: str

    needs = ("ref_logprobs",)
    waits = "kl_in_reward changes the advantages after all groups are sampled"

    def of_tokens_of(self, sampler: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return ESTIMATORS[self.estimator]((sampler - reference).nan_to_num(nan=0.0))  # unknown log-probabilities add 0

    def with_scores(self, step: StepBatch, estimator: AdvantageEstimator) -> StepBatch:
        sums: dict[RolloutId, float] = {}
        for row in step.rows:
            rollouts = [rollout for part in row.parts for rollout in part.rollouts]
            sampler = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
            tokens = self.of_tokens_of(sampler.double(), row.scores["ref_logprobs"].double().cpu())
            tokens = tokens * torch.cat([rollout.sampled for rollout in rollouts])
            sums |= {identity: float(tokens[place].sum()) for identity, place in places(row)}
        groups, changed = list[ScoredGroup](), dict[RolloutId, Any]()
        for scored in step.groups:
            if not torch.equal(scored.advantages, estimator.of_group(scored.rewards)):
                raise ValueError(
                    f"kl_in_reward is {self.coefficient:g}, but the advantages weren't computed from the group's "
                    "rewards alone (compute_advantages is overridden, or there is one advantage per token): set "
                    "`kl_in_reward: 0`. For a KL term in the loss, set `beta`."
                )
            rewards, ids = weighted_sum(scored.rewards, estimator.weights).double(), scored.group.rollout_ids
            penalty = torch.tensor([sums[identity] for identity in ids], dtype=torch.float64)
            penalised = (rewards - self.coefficient * penalty).to(scored.rewards.dtype)
            advantages = group_advantages(penalised, estimator.scale, estimator.baseline)
            groups.append(dataclasses.replace(scored, advantages=advantages))
            changed |= zip(ids, advantages_of(groups[-1]), strict=True)
        rows = []
        for row in step.rows:
            of_parts = ((part, tuple(map(changed.get, part.ids, part.advantages))) for part in row.parts)
            parts = tuple(dataclasses.replace(part, advantages=advantages) for part, advantages in of_parts)
            rows.append(dataclasses.replace(row, parts=parts))
        return dataclasses.replace(step, rows=tuple(rows), groups=tuple(groups))

    @torch.no_grad()
    def observe(self, old: torch.Tensor, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> Means:
        batch = tokens.batch
        penalty = self.of_tokens_of(batch.sampler_logprobs, batch.scores["ref_logprobs"])
        return {"kl_in_reward": (penalty.where(batch.loss_mask > 0, 0.0).sum(), batch.loss_mask.sum())}


def penalty_of(config: GRPOConfig, policy: Any) -> LossTerm | None:
    if config.kl_in_reward == 0:
        return None
    name = f"kl_in_reward is {config.kl_in_reward:g}"
    if config.kl_in_reward < 0:
        raise ValueError(f"{name}, but must be at least 0, as the factor of a penalty. Set kl_in_reward to 0 or more.")
    registry.require("reference", f"`kl_in_reward: {config.kl_in_reward:g}`")
    if config.kl_in_reward_estimator not in ESTIMATORS:
        raise ValueError(
            f"kl_in_reward_estimator is {config.kl_in_reward_estimator!r}, but must be one of {', '.join(ESTIMATORS)}."
        )
    if config.scale_rewards.startswith("batch") or config.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            f"{name}, scale_rewards is {config.scale_rewards}, and multi_objective_aggregation is "
            f"{config.multi_objective_aggregation}. The scales `batch` and `batch_centered`, and "
            "`normalize_then_sum`, divide advantages by a standard deviation of rewards without the penalty. Set "
            "scale_rewards to group, mean or none, and multi_objective_aggregation to sum_then_normalize."
        )
    return RewardPenalty(config.kl_in_reward, config.kl_in_reward_estimator)
