"""The difference between the engine's and the trainer's probabilities: importance weights and metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..batch import MicroBatch
from .tokens import Extremes, Means, Tokens, bounded_exp, per_sequence_sum, sequence_mean_weights, summed

DIFFERENCE, RAW = "sampling/sampling_logp_difference", "sampling/raw_ratio"
MASKED, TRUNCATED = "sampling/masked_share", "sampling/truncated_share"
WEIGHT = "sampling/importance_sampling_ratio"
MASKED_TOKENS = "sampling/masked_tokens_share"
SIGNED, SQUARE = "/signed", "/square"  # Names of moments that `finish_mismatch` converts to `/std`.
LARGEST = 30.0  # Bound of log-ratios in metrics, in nats, so that squared ratios fit into float32.


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """Importance weights that correct the difference between the engine's and the trainer's probabilities.

    ratio = exp(log trainer - log sampler), of a token or of a whole completion. TRL's modes clamp the ratio to the
    bounds (`truncate`), or set a ratio outside the bounds to zero (`mask`). Truncated importance sampling:
    https://fengyao.notion.site/off-policy-rl.

    The mode `geometric_mask` has weights of 0 and 1: 1 if exp(m) is within the bounds, where m is the mean of
    (log trainer - log sampler) over a completion ("When Speed Kills Stability", https://richardli.xyz/rl-collapse;
    verl's `rollout_rs: geometric` without importance weights). As in verl, `low` then defaults to 1 / `high`."""

    mode: str
    low: float | None  # Lower bound of the ratio. None: no bound.
    high: float | None  # Upper bound of the ratio. None: no bound.

    def __post_init__(self) -> None:
        if self.mode == "geometric_mask" and self.low is None and self.high is not None:
            object.__setattr__(self, "low", 1 / self.high)

    def weights(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Compute importance weights (N,) from the result of `log_ratio_of`, (N,)."""
        ratio = bounded_exp(log_ratio)
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.low, max=self.high)
        weights = torch.ones_like(ratio) if self.mode == "geometric_mask" else ratio
        return weights.masked_fill(self.outside(ratio), 0.0)

    def outside(self, ratio: torch.Tensor) -> torch.Tensor:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return (ratio < low) | (ratio > high)


def known(difference: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Set differences (N,) to 0 outside the loss mask, and where the sampler's log-probability is unknown (NaN)."""
    return difference.where(loss_mask > 0, 0.0).nan_to_num(nan=0.0)


def log_ratio_of(difference: torch.Tensor, mode: str, batch: MicroBatch) -> torch.Tensor:
    """Convert the tokens' log-ratios (N,) to the log-ratios (N,) that ``mode`` bounds. Token modes: the same values.
    Sequence modes: the completion's sum. Geometric modes: the mean over the completion's tokens in the loss."""
    if mode.startswith("geometric"):
        difference = difference * sequence_mean_weights(batch)
    elif not mode.startswith("sequence"):
        return difference
    return per_sequence_sum(difference, batch)[batch.sequence]


def sampling_metrics(
    tokens: Tokens, correction: SamplerCorrection | None, difference: torch.Tensor, to_sampler: torch.Tensor
) -> tuple[Means, Extremes, Extremes]:
    """Compare sampler and trainer on the tokens in the loss. Return three dicts of metrics: means, minima, maxima.

    Args:
        difference: (N,), the old log-probabilities minus the sampler's, as `known` returns them.
        to_sampler: (N,), the result of `log_ratio_of`.
    """
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
    """Replace second moments in ``metrics``, reduced over ranks, by standard deviations ``.../std``."""
    for name, mean in ((DIFFERENCE, metrics.pop(f"{DIFFERENCE}{SIGNED}", None)), (RAW, metrics.get(f"{RAW}/mean"))):
        square = metrics.pop(f"{name}{SQUARE}", None)
        if square is not None and mean is not None:
            metrics[f"{name}/std"] = math.sqrt(max(square - mean * mean, 0.0))
