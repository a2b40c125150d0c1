"""torch's fused attention on a CPU, with gradients in float32 if the CPU has no bfloat16 instructions.

On such a CPU torch's attention backward in bfloat16 is up to seven times as slow as in float32 (`tests/benchmarks/
attention.py`). torch's forward in bfloat16 isn't slow. So tensors are saved in bfloat16, and cast in the backward.
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
    """Run the fused forward. Return the output (B, H, T, D) and the scores' log-sum-exps (B, H, T), float32. Queries
    are (B, H, T, D), keys and values (B, K, S, D) with K dividing H. ``mask`` is added to the scores."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def gradients(
    gradient: torch.Tensor, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], causal: bool,
    scale: float | None, mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Run the fused backward. Return the gradients of ``inputs`` (query, key, value). ``gradient`` is the output's
    gradient. ``results`` are the two tensors that `attend` returned."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dtype, (out, lse) = gradient.dtype, results
    row = gradient, *inputs, out
    if slow(gradient):
        row, mask = tuple(x.float() for x in row), None if mask is None else mask.float()
    found = kernel(*row, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return tuple(x.to(dtype) for x in found)


def slow(query: torch.Tensor) -> bool:
    """Return whether torch's attention backward is slow for ``query``: bfloat16 on a CPU without such instructions."""
    return query.is_cpu and query.dtype == torch.bfloat16 and cpu_products.wanted()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Compute torch's `scaled_dot_product_attention` on a CPU, without dropout and with a fast backward. ``mask`` is
    bool (True: the query attends to the key), or a float tensor that is added to the scores."""
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
