"""The correction of the sampler's probabilities, and the metrics of the ratio that it bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..batch import MicroBatch
from .tokens import Extremes, Means, Tokens, bounded_exp, per_sequence_sum, sequence_mean_weights

DIFFERENCE, RAW = "sampling/sampling_logp_difference", "sampling/raw_ratio"
MASKED, TRUNCATED = "sampling/masked_share", "sampling/truncated_share"
MASKED_TOKENS = "sampling/masked_tokens_share"  # for a mask of whole completions, which drops long ones first
SIGNED, SQUARE = "/signed", "/square"  # suffixes of the moments for `/std`; not logged
LARGEST = 30.0  # log-ratios are shown up to this, so that a ratio's square stays a float32


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


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """Importance weights that undo the difference between the sampler's and the trainer's probabilities.

    ratio = exp(trainer - sampler), per token or of the whole completion; clamped (`truncate`) or set to zero outside
    the bounds (`mask`). Truncated importance sampling: https://fengyao.notion.site/off-policy-rl; the modes are TRL's.

    One mode is a mask alone: with `geometric_mask` a token's weight is 1 if exp(mean over its completion's tokens of
    log trainer - log sampler) is within the bounds, else 0. Unlike the product of the ratios this doesn't depend on the
    completion's length ("When Speed Kills Stability", https://richardli.xyz/rl-collapse; verl's `rollout_rs: geometric`
    without importance weights). As in verl, its lower bound is the reciprocal of the upper one unless it is set.
    """

    mode: str
    low: float | None
    high: float | None

    @property
    def bounds(self) -> Bounds:
        if self.mode == "geometric_mask" and self.low is None and self.high is not None:
            return Bounds(1 / self.high, self.high)
        return Bounds(self.low, self.high)

    @property
    def per_sequence(self) -> bool:
        return not self.mode.startswith("token")

    def weights(self, trainer: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Compute (N,) weights from the trainer's detached log-probabilities (N,)."""
        ratio = bounded_exp(log_ratio_of(known(trainer - batch.sampler_logprobs, batch.loss_mask), self.mode, batch))
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.low, max=self.high)
        weights = torch.ones_like(ratio) if self.mode == "geometric_mask" else ratio
        return weights.masked_fill(self.bounds.outside(ratio), 0.0)


def known(difference: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Set the (N,) differences from the sampler's log-probabilities to 0 outside the loss and where it gave none
    (NaN)."""
    return difference.where(loss_mask > 0, 0.0).nan_to_num(nan=0.0)


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
