"""The correction of the sampler's probabilities, and the metrics of the ratio that it bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import MicroBatch
from .tokens import bounded_exp, per_sequence_sum, sequence_mean_weights

DIFFERENCE, RAW = "sampling/sampling_logp_difference", "sampling/raw_ratio"
MASKED, TRUNCATED = "sampling/masked_share", "sampling/truncated_share"
WEIGHT = "sampling/importance_sampling_ratio"
MASKED_TOKENS = "sampling/masked_tokens_share"  # for a mask of whole completions, which drops long ones first
SIGNED, SQUARE = "/signed", "/square"  # suffixes of the moments for `/std`; not logged
LARGEST = 30.0  # log-ratios are shown up to this, so that a ratio's square stays a float32


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
    low: float | None  # None: there is no bound
    high: float | None

    def __post_init__(self) -> None:
        if self.mode == "geometric_mask" and self.low is None and self.high is not None:
            object.__setattr__(self, "low", 1 / self.high)

    def weights(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Compute (N,) weights from the logarithms (N,) of `log_ratio_of`."""
        ratio = bounded_exp(log_ratio)
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.low, max=self.high)
        weights = torch.ones_like(ratio) if self.mode == "geometric_mask" else ratio
        return weights.masked_fill(self.outside(ratio), 0.0)

    def outside(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return a mask of the ratios beyond the bounds, (N,) bool."""
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.low is not None:
            outside |= ratio < self.low
        if self.high is not None:
            outside |= ratio > self.high
        return outside


def known(difference: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Set the (N,) differences from the sampler's log-probabilities to 0 outside the loss and where it gave none
    (NaN)."""
    return difference.where(loss_mask > 0, 0.0).nan_to_num(nan=0.0)


def log_ratio_of(difference: torch.Tensor, mode: str, batch: MicroBatch) -> torch.Tensor:
    """Compute the (N,) logarithm of the ratio that a correction's mode bounds, from the tokens' own (N,). It is the
    token's own, or its completion's: the sum, or for `geometric_mask` the mean over its tokens in the loss. Without a
    correction the mode is empty, and the ratio is the token's."""
    if mode.startswith("geometric"):
        difference = difference * sequence_mean_weights(batch)
    elif not mode.startswith("sequence"):
        return difference
    return per_sequence_sum(difference, batch)[batch.sequence]
