"""A loss's view of a micro-batch (`Tokens`), the base of all losses, and the clipped loss of PPO and GRPO.

A loss defines the loss of one token, its average, and the metrics that show its effect; the rest is in `objective.py`.
The average is a sum over a micro-batch's tokens, divided by a denominator of the step. It is the same for all
micro-batches and ranks and is applied once, so the update depends on neither.
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

Means = dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # metric -> (sum, count)
Extremes = dict[str, torch.Tensor]
MOST_LOG_RATIO = (
    20.0  # nats: beyond 88 a float32 ratio is infinite, and its gradient NaN. verl and OpenRLHF have it too
)


def per_sequence_sum(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum over each completion's tokens: (N,) -> (completions,)."""
    return values.new_zeros(len(batch.rollouts)).index_add(0, batch.sequence, values)


def sequence_mean_weights(batch: MicroBatch) -> torch.Tensor:
    """Return (N,) weights that sum to 1 over each completion's tokens in the loss (to 0 if it has none)."""
    lengths = per_sequence_sum(batch.loss_mask, batch).clamp(min=1)
    return batch.loss_mask / lengths[batch.sequence]


def summed(values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a metric's sum and count: of (N,) values with their weights."""
    return (values * weights).sum(), weights.sum()


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute the ratio of a logarithm bounded by +-20; beyond the bounds there is no gradient."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def completion_mean(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Average over each completion's tokens in the loss: (N,) -> (N,). The gradient of a token's entry goes to its own
    value only, so that it depends on its own advantage (GSPO-token, arXiv 2507.18071, eq. 14). If a completion's
    advantages and weights are equal, the sum has the gradient of the mean.
    """
    mean = per_sequence_sum(values.detach() * sequence_mean_weights(batch), batch)[batch.sequence]
    return mean + (values - values.detach())


@dataclass(frozen=True, slots=True)
class Tokens:
    """The values of a micro-batch's N predicted completion tokens that a loss can use."""

    logprobs: torch.Tensor  # (N,) log pi, nats, differentiable
    log_ratio: torch.Tensor  # (N,) log pi / pi_old of the token, differentiable; 0 outside the loss
    token_ratio: torch.Tensor  # (N,) pi / pi_old of the token, bounded, differentiable
    ratio: torch.Tensor  # (N,) pi / pi_old at `importance_sampling_level`, with each token's own gradient
    advantages: torch.Tensor  # (N,)
    correction: torch.Tensor | None  # (N,) pi_old / sampler, bounded, a constant; None: it is off
    per_sequence: bool  # whether `ratio` is one number per completion
    batch: MicroBatch

    @property
    def log_ratio_to_sampler(self) -> torch.Tensor:
        """(N,) log pi / sampler, a constant. It is log pi / pi_old if the sampler gave no probability, or the
        correction is off (for example because truncated sampling gives probabilities of other distributions)."""
        own = self.log_ratio.detach()
        if self.correction is None:
            return own
        difference = self.logprobs.detach() - self.batch.sampler_logprobs
        return difference.where((self.batch.loss_mask > 0) & ~difference.isnan(), own)

    def mean(self, values: torch.Tensor, per_sequence: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce (N,) values to a metric's sum and count: over tokens, or over completions with a loss token if the
        ratio is one number per completion."""
        whole = self.per_sequence if per_sequence is None else per_sequence
        return summed(values, sequence_mean_weights(self.batch) if whole else self.batch.loss_mask)


class TokenLoss(ABC):
    """The mean of a token's loss over all tokens of the step: the base of all objectives. A subclass is a frozen
    dataclass; `from_config` fills the fields that have a configuration field's name."""

    corrects: ClassVar[bool] = False
    """Whether the loss uses `Tokens.correction` itself; else its value is multiplied by it."""
    every_group: ClassVar[bool] = False
    """Whether there is a gradient where the advantage is zero; else such groups aren't packed."""

    @classmethod
    def from_config(cls, config: GRPOConfig) -> Self:
        """Build the loss. Raises ValueError if a field has no default and isn't in the configuration, or the class is
        no dataclass."""
        names: list[str] = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        try:
            return cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})
        except TypeError as error:
            raise ValueError(
                f"loss_type {config.loss_type!r} can't be made ({error}): make it a dataclass, whose fields have the "
                "names of configuration fields, or defaults."
            ) from None

    @abstractmethod
    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """Compute the (N,) loss of each token. Values outside the loss mask are ignored."""

    def token_weights(self, batch: MicroBatch) -> torch.Tensor:
        """Return the (N,) weight of each token in the sum; 0 outside the loss mask."""
        return batch.loss_mask

    def denominator(self, step: StepBatch) -> float:
        """Return the divisor of the step's sum."""
        return float(max(step.num_loss_tokens, 1))

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        """Compute metrics: means, minima, maxima. Called without gradient, for micro-batches with a token in the
        loss."""
        return {}, {}, {}


class OverCompletions(TokenLoss):
    """An average for any loss: the sum of each completion's mean over its tokens, by the number of completions."""

    def token_weights(self, batch: MicroBatch) -> torch.Tensor:
        return sequence_mean_weights(batch)

    def denominator(self, step: StepBatch) -> float:
        return float(max(step.num_sequences, 1))


# -- Clipped


def clip_ratios(tokens: Tokens, below: torch.Tensor, above: torch.Tensor) -> tuple[Means, Extremes, Extremes]:
    """Compute TRL's metrics of a clip: the shares of tokens that lie ``below`` with a negative advantage, or ``above``
    with a positive one (both (N,) bool)."""
    low = (below & (tokens.advantages < 0)).to(tokens.ratio.dtype)
    high = (above & (tokens.advantages > 0)).to(tokens.ratio.dtype)
    batch, means = tokens.batch, sequence_mean_weights(tokens.batch)
    weights = means if tokens.per_sequence else batch.loss_mask
    shares = {"low_mean": low, "high_mean": high, "region_mean": low + high}
    counted = per_sequence_sum(batch.loss_mask, batch) > 0  # completions with a loss token
    lowest = per_sequence_sum(low * means, batch).where(counted, math.inf).min()
    highest = per_sequence_sum(high * means, batch).where(counted, -math.inf).max()
    sums: Means = {f"clip_ratio/{name}": summed(values, weights) for name, values in shares.items()}
    return sums, {"clip_ratio/low_min": lowest}, {"clip_ratio/high_max": highest}


@dataclass(frozen=True)
class ClippedLoss(TokenLoss):
    """The clipped surrogate of PPO and GRPO; subclasses choose the average.

    -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A); ``delta`` bounds the unclipped ratio from above
    (two-sided clipping, INTELLECT-2, arXiv 2505.07291).
    """

    epsilon: float
    epsilon_high: float
    delta: float | None

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        clipped = tokens.ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        bounded = tokens.ratio if self.delta is None else tokens.ratio.clamp(max=self.delta)
        return -torch.min(bounded * tokens.advantages, clipped * tokens.advantages)

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        return clip_ratios(tokens, tokens.ratio < 1 - self.epsilon, tokens.ratio > 1 + self.epsilon_high)
