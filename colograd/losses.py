"""Objectives: one small class each, holding its own knobs; the registry is at the end.

A loss gets one micro-batch and returns an unnormalised SUM over its tokens. The step's denominator, the same for all
micro-batches and ranks, is applied once by the trainer; so the update depends on neither the micro-batches nor the
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import LossOutput, MicroBatch, StepBatch
from .config import GRPOConfig


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """Importance weights that undo the difference between the sampler's and the trainer's probabilities.

    ratio = exp(trainer - sampler), per token or of the whole completion; clamped (`truncate`) or set to zero outside
    the bounds (`mask`). Truncated importance sampling: https://fengyao.notion.site/off-policy-rl; the modes are TRL's.
    """

    mode: str
    low: float | None
    high: float | None

    def weights(self, trainer: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """(N,) weights from the trainer's detached log-probabilities (N,)."""
        difference = (trainer - batch.sampler_logprobs) * batch.loss_mask
        if self.mode.startswith("sequence"):
            difference = per_sequence_sum(difference, batch)[batch.sequence]
        ratio = difference.exp()
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.low, max=self.high)
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.low is not None:
            outside |= ratio < self.low
        if self.high is not None:
            outside |= ratio > self.high
        return ratio.masked_fill(outside, 0.0)


def per_sequence_sum(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """(N,) -> (num_sequences,): sums over each completion's tokens."""
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence, values)


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """The clipped surrogate of PPO and GRPO; subclasses say what it is averaged over.

    -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A), with ratio = exp(new - old); ``delta`` bounds the
    unclipped ratio from above (two-sided clipping, INTELLECT-2, arXiv 2505.07291). On-policy old is new, detached: the
    ratio is 1 and its gradient that of the log-probability.
    """

    epsilon: float
    epsilon_high: float
    delta: float | None
    correction: SamplerCorrection | None
    max_completion_length: int

    @classmethod
    def from_config(cls, config: GRPOConfig) -> ClippedLoss:
        correction = None
        if config.vllm_importance_sampling_correction:
            correction = SamplerCorrection(
                config.vllm_importance_sampling_mode,
                config.vllm_importance_sampling_clip_min,
                config.vllm_importance_sampling_clip_max,
            )
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        return cls(config.epsilon, high, config.delta, correction, config.max_completion_length or 1)

    def denominator(self, step: StepBatch) -> float:
        """What the step's sum is divided by."""
        return float(max(step.num_loss_tokens, 1))

    def token_weights(self, batch: MicroBatch) -> torch.Tensor:
        """(N,) weight of each token in the sum."""
        return batch.loss_mask

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Loss of one micro-batch from the policy's log-probabilities (N,) and entropies (N,), in nats."""
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        per_token = -torch.min(bounded * batch.advantages, clipped * batch.advantages)
        weights = None
        if self.correction is not None:
            weights = self.correction.weights(old, batch)
            per_token = per_token * weights
        loss = (per_token * self.token_weights(batch)).sum()
        return LossOutput(loss, *self.observe(ratio.detach(), entropy, old, weights, batch))

    @torch.no_grad()
    def observe(
        self,
        ratio: torch.Tensor,
        entropy: torch.Tensor,
        old: torch.Tensor,
        weights: torch.Tensor | None,
        batch: MicroBatch,
    ) -> tuple[dict, dict, dict]:
        """TRL's metrics of one micro-batch: sums with counts, minima, maxima. Completions without a loss token "
        "don't count."""
        mask, tokens = batch.loss_mask, batch.loss_mask.sum()
        low = ((ratio < 1 - self.epsilon) & (batch.advantages < 0)) * mask
        high = ((ratio > 1 + self.epsilon_high) & (batch.advantages > 0)) * mask
        difference = (old - batch.sampler_logprobs).abs() * mask
        sums = {
            "entropy": ((entropy * mask).sum(), tokens),
            "clip_ratio/low_mean": (low.sum(), tokens),
            "clip_ratio/high_mean": (high.sum(), tokens),
            "clip_ratio/region_mean": (low.sum() + high.sum(), tokens),
            "sampling/sampling_logp_difference/mean": (difference.sum(), tokens),
        }
        if weights is not None:
            sums["sampling/importance_sampling_ratio/mean"] = ((weights * mask).sum(), tokens)
        per_completion = per_sequence_sum(mask, batch)
        counted = per_completion > 0
        if not counted.any():
            return sums, {}, {}
        minima = {"clip_ratio/low_min": (per_sequence_sum(low, batch) / per_completion)[counted].min()}
        maxima = {
            "clip_ratio/high_max": (per_sequence_sum(high, batch) / per_completion)[counted].max(),
            "sampling/sampling_logp_difference/max": difference.max(),
        }
        if weights is not None:
            minima["sampling/importance_sampling_ratio/min"] = weights[mask > 0].min()
            maxima["sampling/importance_sampling_ratio/max"] = weights[mask > 0].max()
        return sums, minima, maxima


class DAPOLoss(ClippedLoss):
    """Mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8): long completions weigh by their tokens."""


class BNPOLoss(ClippedLoss):
    """Mean over the tokens in the loss. TRL takes it per micro-batch; over the step it is DAPO's."""


class GRPOLoss(ClippedLoss):
    """Mean over completions of each one's mean over tokens (DeepSeekMath, arXiv 2402.03300, eq. 3)."""

    def denominator(self, step: StepBatch) -> float:
        return float(max(step.num_sequences, 1))

    def token_weights(self, batch: MicroBatch) -> torch.Tensor:
        lengths = per_sequence_sum(batch.loss_mask, batch).clamp(min=1)
        return batch.loss_mask / lengths[batch.sequence]


class DrGRPOLoss(ClippedLoss):
    """Sum over tokens by the constant max_completion_length (Dr. GRPO, arXiv 2503.20783): no length bias."""

    def denominator(self, step: StepBatch) -> float:
        return float(max(step.num_sequences, 1) * self.max_completion_length)


LOSSES: dict[str, type[ClippedLoss]] = {
    "dapo": DAPOLoss,
    "bnpo": BNPOLoss,
    "grpo": GRPOLoss,
    "dr_grpo": DrGRPOLoss,
}
