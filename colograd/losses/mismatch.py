"""Differences between the sampler's and the trainer's probabilities of the same tokens, and their consequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import MicroBatch
from ..config import GRPOConfig
from .token_losses import Extremes, Means, Tokens, per_sequence_sum, sequence_mean_weights

DIFFERENCE, RAW = "sampling/sampling_logp_difference", "sampling/raw_ratio"
MASKED, TRUNCATED = "sampling/masked_share", "sampling/truncated_share"
MASKED_TOKENS = "sampling/masked_tokens_share"  # for a mask of whole completions, which drops long ones first
SIGNED, SQUARE = "/signed", "/square"  # suffixes of the moments for `/std`; not logged
LARGEST = 30.0  # log-ratios are shown up to this, so that a ratio's square stays a float32
HALF = 0.5  # effective share of completions below which a line is due


def log_ratio_of(difference: torch.Tensor, mode: str, batch: MicroBatch) -> torch.Tensor:
    """Compute the (N,) logarithm of the ratio that a correction's mode bounds, from the tokens' own (N,).

    It is the token's own, or its completion's: the sum, or for `geometric_mask` the mean over its tokens in the loss.
    """
    if mode.startswith("geometric"):
        difference = difference * sequence_mean_weights(batch)
    elif not mode.startswith("sequence"):
        return difference
    return per_sequence_sum(difference, batch)[batch.sequence]


def observe(tokens: Tokens, difference: torch.Tensor, mode: str, bounds: Bounds) -> tuple[Means, Extremes, Extremes]:
    """Sum the ratio before it is bounded, with counts, minima and maxima; for a micro-batch with a loss token.

    Args:
        difference: (N,) trainer less sampler, nats; 0 where it isn't known.
        mode: the correction's mode; empty: there is no correction, and the ratios are per token.
    """
    batch, whole = tokens.batch, mode.startswith(("sequence", "geometric"))
    ratio = log_ratio_of(difference, mode, batch).clamp(-LARGEST, LARGEST).exp()
    sums: Means = {
        f"{DIFFERENCE}{SIGNED}": tokens.mean(difference, False),
        f"{DIFFERENCE}{SQUARE}": tokens.mean(difference.square(), False),
        f"{RAW}/mean": tokens.mean(ratio, whole),
        f"{RAW}{SQUARE}": tokens.mean(ratio.square(), whole),
    }
    if mode:
        outside = bounds.outside(ratio).to(ratio.dtype)
        sums[MASKED if mode.endswith("mask") else TRUNCATED] = tokens.mean(outside, whole)
        if whole and mode.endswith("mask"):
            sums[MASKED_TOKENS] = tokens.mean(outside, False)
    counted = batch.loss_mask > 0
    lowest, highest = ratio.where(counted, math.inf).min(), ratio.where(counted, -math.inf).max()
    return sums, {f"{RAW}/min": lowest}, {f"{RAW}/max": highest}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a correction's ratio; None: there is no bound."""

    low: float | None = None
    high: float | None = None

    def outside(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return a mask of the ratios beyond the bounds, (N,) bool."""
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.low is not None:
            outside |= ratio < self.low
        if self.high is not None:
            outside |= ratio > self.high
        return outside


def effective_share(spread: float, tokens: float, bounds: Bounds, masks: bool) -> float:
    """Estimate the share of completions of ``tokens`` tokens that counts: E[w]^2 / E[w^2], the effective sample size of
    importance sampling (Kong 1992). w is the ratio; beyond the bounds it is 0 (``masks``) or the bound.

    Tokens' log-ratios count as independent and normal, with standard deviation ``spread``; the ratio's mean counts as
    1.
    """
    width = spread * math.sqrt(tokens)
    if not width:
        return 1.0
    centre = -width * width / 2
    low = math.log(bounds.low) if bounds.low else -math.inf
    high = math.log(bounds.high) if bounds.high else math.inf

    def moment(power: int) -> float:
        shift = centre + power * width * width
        found = math.exp(min(power * centre + (power * width) ** 2 / 2, 700.0)) * (
            _normal((high - shift) / width) - _normal((low - shift) / width)
        )
        if not masks and math.isfinite(high):
            found += math.exp(power * high) * _normal((centre - high) / width)
        if not masks and math.isfinite(low):
            found += math.exp(power * low) * _normal((low - centre) / width)
        return found

    second = moment(2)
    return moment(1) ** 2 / second if second > 0 else 0.0


def _normal(x: float) -> float:
    """Evaluate the standard normal distribution function, exact in its lower tail."""
    return math.erfc(-x / math.sqrt(2)) / 2


class SamplerMismatch:
    """The standard deviations of a step's moments, and one line of advice if long completions hardly count."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self._advised = False

    def finish(self, metrics: dict[str, float]) -> None:
        """Replace the moments among the reduced metrics of a step, or of an evaluation, by standard deviations."""
        for name, mean in ((DIFFERENCE, metrics.pop(f"{DIFFERENCE}{SIGNED}", None)), (RAW, metrics.get(f"{RAW}/mean"))):
            square = metrics.pop(f"{name}{SQUARE}", None)
            if square is not None and mean is not None:
                metrics[f"{name}/std"] = math.sqrt(max(square - mean * mean, 0.0))

    def advice(self, metrics: dict[str, Any]) -> str:
        """Return a line after the first step with metrics, from `finish`, that show that the longest completions
        hardly count."""
        config, spread = self.config, metrics.get(f"{DIFFERENCE}/std", 0.0)
        mode, longest = config.vllm_importance_sampling_mode, config.max_completion_length or 1
        if self._advised or not config.vllm_importance_sampling_correction or not mode.startswith("sequence"):
            return ""
        bounds = Bounds(config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)

        def share(tokens: int) -> float:
            return effective_share(spread, tokens, bounds, mode.endswith("mask"))

        if share(longest) >= HALF:
            return ""
        self._advised = True
        short, long = 1, longest  # the share falls with the length
        while long - short > 1:
            middle = (short + long) // 2
            short, long = (middle, long) if share(middle) >= HALF else (short, middle)
        closer = "bring the two closer (cast_lm_head_to_fp32: true; dtype: float32 with bf16: false)"
        if config.carry_over is not None:
            closer = "raise carry_over, as tokens of older weights differ more"
        return (
            f"sampler: its log-probabilities and the trainer's differ by {spread:.3f} nats (a token's standard "
            f"deviation), so with vllm_importance_sampling_mode: {mode} completions of more than about {short:,} "
            f"tokens count less than half, and of {longest:,} tokens {share(longest):.0%}: set "
            f"token_truncate, or {closer}"
        )
