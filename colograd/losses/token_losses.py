"""Objectives: one small class each, holding its own knobs; the registry is at the end.

A class defines the loss of one token, its average, and the metrics that show its effect; the rest is in `objective.py`.
The average is a sum over a micro-batch's tokens, divided by a denominator of the step. It is the same for all
micro-batches and ranks and is applied once, so the update depends on neither.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from ..batch import MicroBatch, StepBatch
from ..config import GRPOConfig
from ..runtime.importing import find_object

Means = dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]  # metric -> (sum, count)
Extremes = dict[str, torch.Tensor]
MOST_WEIGHT = 20.0  # largest weight of a token in DPPO, as in its authors' code
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


def chosen(condition: torch.Tensor, yes: float, no: float, like: torch.Tensor) -> torch.Tensor:
    """Choose between two numbers as `torch.where`. They are made on the device: for copies the host would wait."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


@dataclass(frozen=True, slots=True)
class Tokens:
    """The values of a micro-batch's N predicted completion tokens that a loss can use."""

    logprobs: torch.Tensor  # (N,) log pi, nats, differentiable
    log_ratio: torch.Tensor  # (N,) log pi / pi_old of the token, differentiable; 0 outside the loss
    token_ratio: torch.Tensor  # (N,) pi / pi_old of the token, bounded, differentiable
    ratio: torch.Tensor  # (N,) pi / pi_old at `importance_sampling_level`, with each token's own gradient
    correction: torch.Tensor | None  # (N,) pi_old / sampler, bounded, a constant; None: it is off
    per_sequence: bool  # whether `ratio` is one number per completion
    batch: MicroBatch

    @property
    def advantages(self) -> torch.Tensor:
        """(N,) advantages, one per token"""
        return self.batch.advantages

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
        weights = sequence_mean_weights(self.batch) if whole else self.batch.loss_mask
        return (values * weights).sum(), weights.sum()

    def of_completions(self, values: torch.Tensor, otherwise: float) -> torch.Tensor:
        """Average over each completion, (N,) -> (completions,); ``otherwise`` for one without a loss token."""
        counted = per_sequence_sum(self.batch.loss_mask, self.batch) > 0
        return per_sequence_sum(values * sequence_mean_weights(self.batch), self.batch).where(counted, otherwise)


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
    shares = {"low_mean": low, "high_mean": high, "region_mean": low + high}
    means = {f"clip_ratio/{name}": tokens.mean(values) for name, values in shares.items()}
    lowest, highest = tokens.of_completions(low, math.inf).min(), tokens.of_completions(high, -math.inf).max()
    return means, {"clip_ratio/low_min": lowest}, {"clip_ratio/high_max": highest}


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


class DAPOLoss(ClippedLoss):
    """Mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8): long completions weigh by their tokens."""


class BNPOLoss(ClippedLoss):
    """Mean over the tokens in the loss. TRL takes it per micro-batch; over the step it is DAPO's."""


class GRPOLoss(OverCompletions, ClippedLoss):
    """Mean over completions of each one's mean over tokens (DeepSeekMath, arXiv 2402.03300, eq. 3). With one ratio per
    completion it is GSPO (arXiv 2507.18071)."""


@dataclass(frozen=True)
class DrGRPOLoss(ClippedLoss):
    """Sum over tokens by the constant max_completion_length (Dr. GRPO, arXiv 2503.20783): no length bias."""

    max_completion_length: int

    def denominator(self, step: StepBatch) -> float:
        return float(max(step.num_sequences, 1) * self.max_completion_length)


class LUSPOLoss(ClippedLoss):
    """Mean over completions of the sum over tokens (LUSPO, arXiv 2602.05261): with one ratio per completion, GSPO's
    loss times the completion's length, without GSPO's length bias."""

    denominator = OverCompletions.denominator


@dataclass(frozen=True)
class GMPOLoss(OverCompletions):
    """The geometric mean of a completion's ratios (GMPO, arXiv 2507.20673, eq. 4): -exp(mean of log ratios) * A.

    Each log ratio is clipped by itself, above ``epsilon_high`` where A > 0, below -``epsilon`` elsewhere: bounds of
    logarithms, 0.4 in the paper. The paper has one advantage per completion; for several see `completion_mean`.
    """

    epsilon: float
    epsilon_high: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        clipped = torch.where(
            tokens.advantages > 0,
            tokens.log_ratio.clamp(max=self.epsilon_high),
            tokens.log_ratio.clamp(min=-self.epsilon),
        )
        return -bounded_exp(completion_mean(clipped, tokens.batch)) * tokens.advantages

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        return clip_ratios(tokens, tokens.log_ratio < -self.epsilon, tokens.log_ratio > self.epsilon_high)


# -- Not clipped


@dataclass(frozen=True)
class CISPOLoss(TokenLoss):
    """Clipped importance weights (MiniMax-M1, arXiv 2506.13585): -clip(ratio, epsilon_high) * A * log pi, the
    clipped ratio a constant. No token loses its gradient.

    ``epsilon_high`` is the bound itself, not its distance from 1 (ScaleRL, arXiv 2510.13786, takes 5).
    """

    epsilon_high: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.ratio.detach().clamp(max=self.epsilon_high) * tokens.advantages * tokens.logprobs

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        clipped = (tokens.ratio > self.epsilon_high).to(tokens.ratio.dtype)
        return {"cispo_clip_ratio": tokens.mean(clipped)}, {}, {}


@dataclass(frozen=True)
class DPPOLoss(TokenLoss):
    """A trust region of probabilities (DPPO-Binary-TV, arXiv 2602.04879): -min(w, delta) * A * log pi, with the
    constant weight w = pi / sampler. A token has no gradient if its probability has already moved too far: by more than
    ``epsilon_high`` up if A > 0, by more than ``epsilon`` down otherwise. A bound of the ratio would treat rare tokens,
    which hardly matter, like likely ones. The paper takes 0.2, and 20 for ``delta``.
    """

    corrects: ClassVar[bool] = True

    epsilon: float
    epsilon_high: float
    delta: float | None

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        log_ratio = tokens.log_ratio_to_sampler
        weight = log_ratio.exp().clamp(max=MOST_WEIGHT if self.delta is None else self.delta)
        moved = self.moved(tokens)
        outside = torch.where(tokens.advantages > 0, moved > self.epsilon_high, moved < -self.epsilon)
        return -weight.masked_fill(outside, 0.0) * tokens.advantages * tokens.logprobs

    @torch.no_grad()
    def moved(self, tokens: Tokens) -> torch.Tensor:
        """Compute (N,) pi - sampler."""
        return tokens.logprobs.exp() - (tokens.logprobs - tokens.log_ratio_to_sampler).exp()

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        moved = self.moved(tokens)
        return clip_ratios(tokens, moved < -self.epsilon, moved > self.epsilon_high)


@dataclass(frozen=True)
class SAPOLoss(OverCompletions):
    """A soft gate instead of the clip (SAPO, arXiv 2511.20347): -4/t * sigmoid(t * (ratio - 1)) * A, with a temperature
    t for positive advantages and one for the others. Its slope is 1 at ratio 1 and falls off on both sides."""

    sapo_temperature_pos: float
    sapo_temperature_neg: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        ratio, good = tokens.ratio, tokens.advantages > 0
        temperature = chosen(good, self.sapo_temperature_pos, self.sapo_temperature_neg, ratio)
        return -torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * tokens.advantages


@dataclass(frozen=True)
class VESPOLoss(TokenLoss):
    """A Gamma-shaped weight of the whole completion (VESPO, arXiv 2602.10693): -phi(w) * A * log pi, phi a constant.

    phi(w) = e^lambda w^k e^(-lambda w), phi(1) = 1, with k and lambda for advantages >= 0 and others for the rest.
    w = pi / sampler of the whole completion: the product of the tokens' ratios and of their sampler corrections.
    """

    corrects: ClassVar[bool] = True

    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return -self.phi(tokens) * tokens.advantages * tokens.logprobs

    @torch.no_grad()
    def phi(self, tokens: Tokens) -> torch.Tensor:
        """Compute the (N,) weight of each token's completion. The logarithms' bounds are the reference
        implementation's."""
        batch, least = tokens.batch, math.log(1e-8)
        log_weight = tokens.log_ratio.clamp(-20.0, 20.0)
        if tokens.correction is not None:
            log_weight = log_weight + tokens.correction.log().clamp(least, 20.0)
        log_weight = per_sequence_sum(log_weight * batch.loss_mask, batch).clamp(least, 20.0)[batch.sequence]
        good = tokens.advantages >= 0
        k = chosen(good, self.vespo_k_pos, self.vespo_k_neg, log_weight)
        rate = chosen(good, self.vespo_lambda_pos, self.vespo_lambda_neg, log_weight).clamp(min=1e-4)
        phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
        return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        return {"vespo/phi_seq_mean": tokens.mean(self.phi(tokens), per_sequence=True)}, {}, {}


LOSSES: dict[str, type[TokenLoss]] = {
    "dapo": DAPOLoss,
    "bnpo": BNPOLoss,
    "grpo": GRPOLoss,
    "dr_grpo": DrGRPOLoss,
    "luspo": LUSPOLoss,
    "cispo": CISPOLoss,
    "sapo": SAPOLoss,
    "vespo": VESPOLoss,
    "gmpo": GMPOLoss,
    "dppo": DPPOLoss,
}


def find_loss(loss_type: str) -> type[TokenLoss]:
    """Find the loss class by its name in the registry or its import path (``package.module:Class``, or with a dot).

    Raises:
        ValueError: there is no such class, or it isn't a `TokenLoss`.
    """
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    found = find_object(loss_type, "loss_type", inspect.isclass)
    if not (inspect.isclass(found) and issubclass(found, TokenLoss)):
        raise ValueError(
            f"loss_type {loss_type!r} is {found!r}, but must be a class derived from colograd.losses.TokenLoss: see "
            "docs/losses.md."
        )
    return found
