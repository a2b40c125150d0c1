"""The difference between the engine's and the trainer's probabilities: importance weights that correct the difference,
and metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..batch import MicroBatch
from .tokens import Extremes, Means, Tokens, bounded_exp, per_sequence_sum, sequence_mean_weights, summed

DIFFERENCE, RAW = "sampling/sampling_logp_difference", "sampling/raw_ratio"
MASKED, TRUNCATED = "sampling/masked_share", "sampling/truncated_share"
WEIGHT = "sampling/importance_sampling_ratio"
MASKED_TOKENS = "sampling/masked_tokens_share"  # Metric: share of tokens that are in masked completions.
SIGNED, SQUARE = "/signed", "/square"  # Suffixes of moments that `finish_mismatch` converts to `/std` before logging.
LARGEST = 30.0  # Bound of log-ratios (nats) in metrics, so that a ratio's square fits into float32.


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """Importance weights that correct the difference between the engine's and the trainer's probabilities.

    ratio = exp(log trainer - log sampler), of a token or of a whole completion. TRL's modes clamp the ratio to the
    bounds (`truncate`), or set a ratio outside the bounds to zero (`mask`). Truncated importance sampling:
    https://fengyao.notion.site/off-policy-rl.

    The mode `geometric_mask` has weights of 0 and 1. A completion's tokens have weight 1 if exp(mean over the tokens of
    log trainer - log sampler) is within the bounds. Unlike the product of the ratios, the mean doesn't depend on the
    completion's length ("When Speed Kills Stability", https://richardli.xyz/rl-collapse; verl's `rollout_rs: geometric`
    without importance weights). As in verl, the default of `low` in this mode is 1 / `high`."""

    mode: str
    low: float | None  # Lower bound of the ratio. None means no bound.
    high: float | None  # Upper bound of the ratio. None means no bound.

    def __post_init__(self) -> None:
        if self.mode == "geometric_mask" and self.low is None and self.high is not None:
            object.__setattr__(self, "low", 1 / self.high)

    def weights(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Compute the tokens' importance weights (N,) from log-ratios (N,), the result of `log_ratio_of`."""
        ratio = bounded_exp(log_ratio)
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.low, max=self.high)
        weights = torch.ones_like(ratio) if self.mode == "geometric_mask" else ratio
        return weights.masked_fill(self.outside(ratio), 0.0)

    def outside(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return (N,) bool, True where ``ratio`` (N,) is below `low` or above `high`."""
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.low is not None:
            outside |= ratio < self.low
        if self.high is not None:
            outside |= ratio > self.high
        return outside


def known(difference: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return differences (N,) between the trainer's and the sampler's log-probabilities, with 0 for tokens outside the
    loss mask and for tokens without a sampler's log-probability (NaN)."""
    return difference.where(loss_mask > 0, 0.0).nan_to_num(nan=0.0)


def log_ratio_of(difference: torch.Tensor, mode: str, batch: MicroBatch) -> torch.Tensor:
    """Convert log-ratios of tokens (N,) to the log-ratios (N,) that a `SamplerCorrection` with ``mode`` bounds. A token
    mode and the empty mode (no correction) return ``difference``. For sequence modes every token gets the sum over its
    completion, and for `geometric_mask` the mean over the completion's tokens in the loss."""
    if mode.startswith("geometric"):
        difference = difference * sequence_mean_weights(batch)
    elif not mode.startswith("sequence"):
        return difference
    return per_sequence_sum(difference, batch)[batch.sequence]


def sampling_metrics(
    tokens: Tokens, correction: SamplerCorrection | None, difference: torch.Tensor, to_sampler: torch.Tensor
) -> tuple[Means, Extremes, Extremes]:
    """Compute TRL's metrics of sampler against trainer: sums with counts, minima, maxima. Tokens outside the loss don't
    count. ``difference`` (N,) is the result of `known`: the old log-probabilities minus the sampler's. ``to_sampler``
    (N,) is the result of `log_ratio_of`."""
    mask, mode = tokens.batch.loss_mask, "" if correction is None else correction.mode
    weights = sequence_mean_weights(tokens.batch) if mode.startswith(("sequence", "geometric")) else mask
    ratio, counted = to_sampler.clamp(-LARGEST, LARGEST).exp(), mask > 0
    sums: Means = {
        f"{DIFFERENCE}{SIGNED}": summed(difference, mask),
        f"{DIFFERENCE}{SQUARE}": summed(difference.square(), mask),
        f"{RAW}/mean": summed(ratio, weights),
        f"{RAW}{SQUARE}": summed(ratio.square(), weights),
    }
    minima = {f"{RAW}/min": ratio.where(counted, torch.inf).min()}
    maxima = {f"{RAW}/max": ratio.where(counted, -torch.inf).max()}
    if correction is not None and tokens.correction is not None:
        outside = correction.outside(ratio).to(ratio.dtype)
        sums[MASKED if mode.endswith("mask") else TRUNCATED] = summed(outside, weights)
        if mode in ("sequence_mask", "geometric_mask"):
            sums[MASKED_TOKENS] = summed(outside, mask)
        sums[f"{WEIGHT}/mean"] = summed(tokens.correction, weights)
        minima[f"{WEIGHT}/min"] = tokens.correction.where(counted, torch.inf).min()
        maxima[f"{WEIGHT}/max"] = tokens.correction.where(counted, -torch.inf).max()
    return sums, minima, maxima


def finish_mismatch(metrics: dict[str, float]) -> None:
    """Add standard deviations ``.../std`` to ``metrics`` (reduced over ranks), computed from first and second moments.
    Remove the moments that aren't logged."""
    for name, mean in ((DIFFERENCE, metrics.pop(f"{DIFFERENCE}{SIGNED}", None)), (RAW, metrics.get(f"{RAW}/mean"))):
        square = metrics.pop(f"{name}{SQUARE}", None)
        if square is not None and mean is not None:
            metrics[f"{name}/std"] = math.sqrt(max(square - mean * mean, 0.0))
