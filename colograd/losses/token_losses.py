"""The losses by name, each a small class that holds its own knobs; the registry is at the end."""

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

MOST_WEIGHT = 20.0  # largest weight of a token in DPPO, as in its authors' code


def chosen(condition: torch.Tensor, yes: float, no: float, like: torch.Tensor) -> torch.Tensor:
    """Choose between two numbers as `torch.where`. They are made on the device: for copies the host would wait."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


# -- Clipped


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
    """Find the loss class by its name in the registry or its import path (``package.module:Class``, or with a dot)."""
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    found = find_object(loss_type, "loss_type", inspect.isclass)
    if not (inspect.isclass(found) and issubclass(found, TokenLoss)):
        raise ValueError(
            f"loss_type {loss_type!r} is {found!r}, but must be a class derived from colograd.losses.TokenLoss: see "
            "docs/losses.md."
        )
    return found
