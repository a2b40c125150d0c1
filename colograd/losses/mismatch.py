"""Standard deviations of the differences between sampler and trainer, and advice if long completions hardly count."""

from __future__ import annotations

import functools
import math
from typing import Any

from ..config import GRPOConfig
from .correction import DIFFERENCE, RAW, SIGNED, SQUARE, SamplerCorrection

HALF = 0.5  # effective share of completions below which a line is due


def effective_share(spread: float, tokens: float, correction: SamplerCorrection) -> float:
    """Estimate the share of completions of ``tokens`` tokens that counts: E[w]^2 / E[w^2], the effective sample size of
    importance sampling (Kong 1992). w is the ratio; beyond the bounds it is 0 (a mask) or the bound.

    Tokens' log-ratios count as independent and normal, with standard deviation ``spread``; the ratio's mean counts as
    1.
    """
    width = spread * math.sqrt(tokens)
    if not width:
        return 1.0
    centre = -width * width / 2
    low = math.log(correction.low) if correction.low else -math.inf
    high = math.log(correction.high) if correction.high else math.inf
    masks = correction.mode.endswith("mask")

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
        bounds = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        share = functools.partial(effective_share, spread, correction=SamplerCorrection(mode, *bounds))

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
