"""`Tokens`, the values that a loss reads; `TokenLoss`, the base of all losses; and the clipped loss of PPO and GRPO.

A `TokenLoss` defines the loss of one token, the average over tokens, and metrics. The average is a weighted sum over a
micro-batch's tokens, divided by a denominator of the whole step. So the update doesn't depend on the micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from ..batch import MicroBatch, StepBatch
from ..config import GRPOConfig

Means = dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # Metric name -> (sum, count).
Extremes = dict[str, torch.Tensor]
MOST_LOG_RATIO = 20.0  # Bound of log-ratios in nats, as in verl and OpenRLHF. Above 88 a float32 ratio is infinite.


def per_sequence_sum(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum ``values`` (N,) over the tokens of each completion in the row. Return (num_sequences,)."""
    return values.new_zeros(len(batch.rollouts)).index_add(0, batch.sequence, values)


def sequence_mean_weights(batch: MicroBatch) -> torch.Tensor:
    """Return weights (N,): 1 / (the completion's number of tokens in the loss), or 0 for a token outside the loss."""
    lengths = per_sequence_sum(batch.loss_mask, batch).clamp(min=1)
    return batch.loss_mask / lengths[batch.sequence]


def summed(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (values * weights).sum(), weights.sum()


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute exp(``log_ratio``) with ``log_ratio`` clamped to [-20, 20]. A clamped entry has no gradient."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def completion_mean(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return for each token the mean of ``values`` over its completion's tokens in the loss: (N,) -> (N,).

    In the backward, a token's result passes its gradient only to the same token's value. So a completion's tokens may
    have different advantages (GSPO-token, arXiv 2507.18071, eq. 14)."""
    mean = per_sequence_sum(values.detach() * sequence_mean_weights(batch), batch)[batch.sequence]
    return mean + (values - values.detach())


@dataclass(frozen=True, slots=True)
class Tokens:
    """The values that a loss reads, for the N completion tokens that a micro-batch predicts."""

    logprobs: torch.Tensor  # Log-probabilities of the policy pi, (N,), in nats, differentiable.
    log_ratio: torch.Tensor  # Log-ratios log(pi / pi_old) of the tokens, (N,), differentiable; 0 outside the loss mask.
    token_ratio: torch.Tensor  # Ratios pi / pi_old of the tokens, (N,), bounded, differentiable.
    ratio: torch.Tensor  # Ratios pi / pi_old at `importance_sampling_level` (token or sequence), (N,), differentiable.
    advantages: torch.Tensor  # Advantages, (N,).
    correction: torch.Tensor | None  # Importance weights of `SamplerCorrection`, (N,), constant. None: no correction.
    per_sequence: bool  # Whether `ratio` is equal for all tokens of a completion.
    batch: MicroBatch

    @property
    def log_ratio_to_sampler(self) -> torch.Tensor:
        """The log-ratios log(pi / sampler), (N,), without gradient; 0 outside the loss mask.

        In a run without the sampler correction, and where the sampler's probability is unknown: log(pi / pi_old)."""
        own = self.log_ratio.detach()
        if self.correction is None:
            return own
        difference = self.logprobs.detach() - self.batch.sampler_logprobs
        return difference.where((self.batch.loss_mask > 0) & ~difference.isnan(), own)

    def mean(self, values: torch.Tensor, per_sequence: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum, count) of a metric that is the mean of ``values`` (N,) over the tokens in the loss.

        With ``per_sequence`` (default: `Tokens.per_sequence`) the metric is the mean of the completions' means."""
        whole = self.per_sequence if per_sequence is None else per_sequence
        return summed(values, sequence_mean_weights(self.batch) if whole else self.batch.loss_mask)


class TokenLoss(ABC):
    """Base class of all losses. By default the loss is the mean over all tokens of the step that count in the loss.

    If a subclass is a dataclass, `from_config` sets the fields that are named like a field of the configuration."""

    corrects: ClassVar[bool] = False
    """Whether `__call__` corrects for the sampler's probabilities. If False, token losses are multiplied by
    `Tokens.correction`."""
    every_group: ClassVar[bool] = False
    """Whether tokens with advantage 0 have a gradient. If False, this loss needs no groups with only zero advantages.
    """

    @classmethod
    def from_config(cls, config: GRPOConfig) -> Self:
        names: list[str] = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        try:
            return cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})
        except TypeError as error:
            raise ValueError(
                f"loss_type {config.loss_type!r} can't be instantiated ({error}): make the loss class a dataclass. "
                "Each of its fields needs a default or the name of a configuration field."
            ) from None

    @abstractmethod
    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """Compute the loss of each token, (N,). Values of tokens outside the loss mask have no effect."""

    def token_weights(self, batch: MicroBatch) -> torch.Tensor:
        """Return the weight (N,) of each token's loss in the sum over tokens; 0 outside the loss mask."""
        return batch.loss_mask

    def denominator(self, step: StepBatch) -> float:
        """Return the number that divides the loss sum of the whole step."""
        return float(max(step.num_loss_tokens, 1))

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        """Return three dicts of metrics: means, minima, maxima. Called under `no_grad`, for rows with loss tokens."""
        return {}, {}, {}


class OverCompletions(TokenLoss):
    """Base of losses that are averaged over the tokens of each completion, then over the completions of a step."""

    def token_weights(self, batch: MicroBatch) -> torch.Tensor:
        return sequence_mean_weights(batch)

    def denominator(self, step: StepBatch) -> float:
        return float(max(step.num_sequences, 1))


def clip_ratios(tokens: Tokens, below: torch.Tensor, above: torch.Tensor) -> tuple[Means, Extremes, Extremes]:
    """Compute TRL's clip metrics: the shares of tokens that the lower bound, the upper bound and either bound clip;
    the smallest share of a completion that the lower bound clips, and the largest share that the upper bound clips.

    Args:
        below: (N,) bool, tokens below the lower bound.
        above: (N,) bool, tokens above the upper bound.
    """
    low = (below & (tokens.advantages < 0)).to(tokens.ratio.dtype)
    high = (above & (tokens.advantages > 0)).to(tokens.ratio.dtype)
    batch, means = tokens.batch, sequence_mean_weights(tokens.batch)
    weights = means if tokens.per_sequence else batch.loss_mask
    shares = {"low_mean": low, "high_mean": high, "region_mean": low + high}
    counted = per_sequence_sum(batch.loss_mask, batch) > 0
    lowest = per_sequence_sum(low * means, batch).where(counted, math.inf).min()
    highest = per_sequence_sum(high * means, batch).where(counted, -math.inf).max()
    sums: Means = {f"clip_ratio/{name}": summed(values, weights) for name, values in shares.items()}
    return sums, {"clip_ratio/low_min": lowest}, {"clip_ratio/high_max": highest}


@dataclass(frozen=True)
class ClippedLoss(TokenLoss):
    """The clipped surrogate loss of PPO and GRPO: -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A).

    ``delta`` is None or an upper bound of ratio in ratio * A (two-sided clipping, INTELLECT-2, arXiv 2505.07291)."""

    epsilon: float
    epsilon_high: float
    delta: float | None

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        clipped = tokens.ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        bounded = tokens.ratio if self.delta is None else tokens.ratio.clamp(max=self.delta)
        return -torch.min(bounded * tokens.advantages, clipped * tokens.advantages)

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        return clip_ratios(tokens, tokens.ratio < 1 - self.epsilon, tokens.ratio > 1 + self.epsilon_high)
