"""The built-in losses, one class per `loss_type`."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..batch import StepBatch
from ..runtime.importing import find_object
from .tokens import (
    ClippedLoss,
    Extremes,
    Means,
    OverCompletions,
    TokenLoss,
    Tokens,
    bounded_exp,
    clip_ratios,
    completion_mean,
    per_sequence_sum,
)

MOST_WEIGHT = 20.0  # Default upper bound of a token's weight in the DPPO loss, as in its authors' code.


def chosen(condition: torch.Tensor, yes: float, no: float, like: torch.Tensor) -> torch.Tensor:
    # `new_full` makes the numbers on the device. A copy from the host would make the host wait.
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


class DAPOLoss(ClippedLoss):
    """Clipped loss, averaged over the step's tokens in the loss (DAPO, arXiv 2503.14476, eq. 8)."""


class GRPOLoss(OverCompletions, ClippedLoss):
    """Clipped loss, averaged over each completion's tokens, then over completions (DeepSeekMath, arXiv 2402.03300,
    eq. 3). With `importance_sampling_level: sequence` it is GSPO (arXiv 2507.18071)."""


@dataclass(frozen=True)
class DrGRPOLoss(ClippedLoss):
    """Clipped loss, summed over tokens and divided by the number of completions x `max_completion_length` (Dr. GRPO,
    arXiv 2503.20783)."""

    max_completion_length: int

    def denominator(self, step: StepBatch) -> float:
        return float(max(step.num_sequences, 1) * self.max_completion_length)


class LUSPOLoss(ClippedLoss):
    """Clipped loss, summed over each completion's tokens, then averaged over completions (LUSPO, arXiv 2602.05261)."""

    denominator = OverCompletions.denominator


@dataclass(frozen=True)
class GMPOLoss(OverCompletions):
    """Loss with the geometric mean of a completion's ratios (GMPO, arXiv 2507.20673, eq. 4): -exp(mean log-ratio) * A.

    Before the mean, each token's log-ratio is clamped: to at most ``epsilon_high`` if A > 0, else to at least
    -``epsilon``. The paper uses 0.4 for both."""

    epsilon: float
    epsilon_high: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        above, below = tokens.log_ratio.clamp(max=self.epsilon_high), tokens.log_ratio.clamp(min=-self.epsilon)
        clipped = torch.where(tokens.advantages > 0, above, below)
        return -bounded_exp(completion_mean(clipped, tokens.batch)) * tokens.advantages

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        return clip_ratios(tokens, tokens.log_ratio < -self.epsilon, tokens.log_ratio > self.epsilon_high)


@dataclass(frozen=True)
class CISPOLoss(TokenLoss):
    """Clipped importance weights (CISPO, from MiniMax-M1, arXiv 2506.13585): -min(ratio, epsilon_high) * A * log pi.

    No gradient flows through the ratio. ``epsilon_high`` bounds the ratio itself, not its distance from 1 (ScaleRL,
    arXiv 2510.13786, uses 5)."""

    epsilon_high: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.ratio.detach().clamp(max=self.epsilon_high) * tokens.advantages * tokens.logprobs

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        clipped = (tokens.ratio > self.epsilon_high).to(tokens.ratio.dtype)
        return {"cispo_clip_ratio": tokens.mean(clipped)}, {}, {}


@dataclass(frozen=True)
class DPPOLoss(TokenLoss):
    """A trust region of probabilities (DPPO-Binary-TV, arXiv 2602.04879): -min(w, delta) * A * log pi.

    w = pi / sampler, or pi / pi_old without the sampler correction. No gradient flows through w. If A > 0, a token has
    no gradient if its probability rose by more than ``epsilon_high``. If A <= 0, a token has no gradient if its
    probability fell by more than ``epsilon``. The paper uses 0.15 for both bounds. If ``delta`` is None, 20 is used."""

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
        """Compute the change of each token's probability, (N,): pi - sampler, or pi - pi_old without the correction."""
        return tokens.logprobs.exp() - (tokens.logprobs - tokens.log_ratio_to_sampler).exp()

    def observe(self, tokens: Tokens) -> tuple[Means, Extremes, Extremes]:
        moved = self.moved(tokens)
        return clip_ratios(tokens, moved < -self.epsilon, moved > self.epsilon_high)


@dataclass(frozen=True)
class SAPOLoss(OverCompletions):
    """A soft gate instead of PPO's clip (SAPO, arXiv 2511.20347): -4/t * sigmoid(t * (ratio - 1)) * A.

    The temperature t is ``sapo_temperature_pos`` if A > 0, else ``sapo_temperature_neg``."""

    sapo_temperature_pos: float
    sapo_temperature_neg: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        ratio, good = tokens.ratio, tokens.advantages > 0
        temperature = chosen(good, self.sapo_temperature_pos, self.sapo_temperature_neg, ratio)
        return -torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * tokens.advantages


@dataclass(frozen=True)
class VESPOLoss(TokenLoss):
    """A Gamma-shaped weight of the whole completion (VESPO, arXiv 2602.10693): -phi(w) * A * log pi.

    phi(w) = w^k * exp(lambda - lambda * w), without gradient. k and lambda are ``vespo_k_pos`` and ``vespo_lambda_pos``
    if A >= 0, else ``vespo_k_neg`` and ``vespo_lambda_neg``. w is the product of (pi / pi_old) * sampler correction
    over the completion's tokens in the loss."""

    corrects: ClassVar[bool] = True

    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return -self.phi(tokens) * tokens.advantages * tokens.logprobs

    @torch.no_grad()
    def phi(self, tokens: Tokens) -> torch.Tensor:
        """Compute phi(w) of each token's completion, (N,), with the bounds of the authors' code."""
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


# TRL's `bnpo` averages over a micro-batch's tokens. Here averages are over a whole step: `bnpo` equals `dapo`.
LOSSES: dict[str, type[TokenLoss]] = {
    "dapo": DAPOLoss, "bnpo": DAPOLoss, "grpo": GRPOLoss, "dr_grpo": DrGRPOLoss, "luspo": LUSPOLoss,
    "cispo": CISPOLoss, "sapo": SAPOLoss, "vespo": VESPOLoss, "gmpo": GMPOLoss, "dppo": DPPOLoss,
}  # fmt: skip


def find_loss(loss_type: str) -> type[TokenLoss]:
    """Return the loss class for a name in `LOSSES` or for an import path ``package.module:Class``."""
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    kind = find_object(loss_type, "loss_type", inspect.isclass)
    if not (inspect.isclass(kind) and issubclass(kind, TokenLoss)):
        raise ValueError(
            f"loss_type {loss_type!r} is {kind!r}, but must be a class derived from colograd.losses.TokenLoss."
        )
    return kind
