"""Metrics of the difference between sampler and trainer, and advice if the correction almost removes completions."""

from __future__ import annotations

import math

from ..config import GRPOConfig
from .correction import DIFFERENCE, RAW, SIGNED, SQUARE, WEIGHT

HALF = 0.5  # Mean importance weight of completions; `mismatch_advice` warns below this value.


def finish_mismatch(metrics: dict[str, float]) -> None:
    """Replace the first and second moments in ``metrics`` (reduced over ranks) by standard deviations ``.../std``."""
    for name, mean in ((DIFFERENCE, metrics.pop(f"{DIFFERENCE}{SIGNED}", None)), (RAW, metrics.get(f"{RAW}/mean"))):
        square = metrics.pop(f"{name}{SQUARE}", None)
        if square is not None and mean is not None:
            metrics[f"{name}/std"] = math.sqrt(max(square - mean * mean, 0.0))


def mismatch_advice(config: GRPOConfig, metrics: dict[str, float]) -> str:
    """Return a warning if the sampler correction's mean weight of completions is below 0.5 in a step, else ""."""
    mode, weight = config.vllm_importance_sampling_mode, metrics.get(f"{WEIGHT}/mean", 1.0)
    if not mode.startswith("sequence") or weight >= HALF:
        return ""
    closer = "bring the two closer (cast_lm_head_to_fp32: true; dtype: float32 with bf16: false)"
    if config.carry_over is not None:
        closer = "raise carry_over, as tokens of older weights differ more"
    return (
        f"sampler: its log-probabilities and the trainer's differ by {metrics.get(f'{DIFFERENCE}/std', 0.0):.3f} nats "
        f"(a token's standard deviation), so with vllm_importance_sampling_mode: {mode} completions weigh {weight:.2f} "
        f"on average, and long ones less: set token_truncate, or {closer}"
    )
