"""Attention with sinks by flash attention's kernels, which know none.

A sink is the logit of a further key, of value 0. So attention with it is the kernel's output times exp(lse - whole),
with the kernel's log-sum-exp and whole = log(exp(lse) + exp(sink)). The backward kernel reads ``lse`` and the output in
two places alone (arXiv 2307.08691, algorithm 2): p = exp(score - lse), and D, the sum of output times gradient. Given
``whole`` and the smaller output it computes the gradients of attention with sinks; the sink's own is that of a key with
dP = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's variable-length flash attention, forward and backward, with its log-sum-exp (heads, tokens)."""
    from torch.nn.attention import varlen  # noqa: F401  # which registers them

    return torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward


class FlashWithSinks(torch.autograd.Function):
    """As `torch.nn.attention.varlen.varlen_attn`, with ``sinks`` (heads,) that each token of a head sees.

    Args:
        query: (T, heads, D); key, value: (keys, key-value heads, D).
        places: first query and first key of each sequence and the ends, the longest of both.
        options: scale, window size on both sides, and whether heads are grouped.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor, int, int], options: tuple[float, tuple[int, int], bool],
    ) -> torch.Tensor:  # fmt: skip
        scale, window, grouped = options
        causal = window == (-1, 0)
        out, lse, state = kernels()[0](query, key, value, *places, causal, scale, list(window), grouped)
        whole = torch.logaddexp(lse, sinks.float()[:, None])
        out = out.mul_((lse - whole).exp_().t().unsqueeze(-1))
        ctx.save_for_backward(query, key, value, sinks, out, whole, state, *places[:2])
        ctx.rest = (*places[2:], causal), (scale, list(window))
        found: torch.Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, whole, state, *places = ctx.saved_tensors
        sizes, options = ctx.rest
        found = kernels()[1](gradient, query, key, value, out, whole, *places, *sizes, state, *options)
        seen = (out * gradient).sum(-1, dtype=torch.float32).t()
        to_sinks = -(torch.exp(sinks.float()[:, None] - whole) * seen).sum(1).to(sinks.dtype)
        return *found, to_sinks, None, None
