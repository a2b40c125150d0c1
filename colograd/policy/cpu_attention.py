"""torch's fused attention of packed rows on a CPU, whose gradients are computed in float32 where it has no products of
bfloat16.

There torch's backward in bfloat16 is plain loops, up to seven times as slow as in float32 (`tests/benchmarks/
attention.py`). Its forward isn't, so what the backward keeps is in the row's dtype, and cast only while it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..runtime import cpu_products


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output (B, H, T, D) and log-sum-exps (B, H, T) float32.

    Args:
        query: (B, H, T, D).
        key, value: (B, K, S, D), K dividing H.
        mask: what is added to the scores, in the queries' dtype; None: nothing.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def gradients(
    gradient: torch.Tensor, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], causal: bool,
    scale: float | None, mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Those of ``inputs`` (query, key, value), given the output's; ``results``: what `attend` gave."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dtype, (out, lse) = gradient.dtype, results
    row = gradient, *inputs, out
    if slow(gradient):
        row, mask = tuple(x.float() for x in row), None if mask is None else mask.float()
    found = kernel(*row, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return tuple(x.to(dtype) for x in found)


def slow(query: torch.Tensor) -> bool:
    """Whether torch's own backward of attention with such queries is."""
    return query.is_cpu and query.dtype == torch.bfloat16 and cpu_products.wanted()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """`scaled_dot_product_attention` without dropout; ``mask``: bool, what is visible, or what is added."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    found: torch.Tensor = _Attention.apply(query, key, value, mask, causal, scale)
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        causal: bool, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        results = attend(query, key, value, causal, scale, mask)
        ctx.save_for_backward(query, key, value, mask, *results)
        ctx.options = causal, scale
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, *results = ctx.saved_tensors
        causal, scale = ctx.options
        found = gradients(gradient, (query, key, value), tuple(results), causal, scale, mask)
        return *found, None, None, None
