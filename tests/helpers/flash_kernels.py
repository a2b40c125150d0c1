"""torch's flash attention for sequences of any lengths, computed plainly, with the operators' arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any,
    scale: float, window_size_left: int, window_size_right: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return output, log-sum-exp (heads, T), and three unused tensors, as torch's operator does."""
    most_q, most_k, dropout, causal, debug = rest
    window = [window_size_left, window_size_right]
    assert causal == (window == [-1, 0]) and dropout == 0.0 and not debug
    assert (most_q, most_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert q.dtype == k.dtype == v.dtype, "the kernel takes one dtype"
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for part, keys, visible in _sequences(cu_q, cu_k, window):
        scores = _scores(q[part], k[keys], scale, visible)
        lse[:, part] = scores.logsumexp(-1)
        out[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _per_query_head(v[keys], q))
    none = torch.empty(0)
    return out, lse, none, none, none


def flash_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_q: torch.Tensor, cu_k: torch.Tensor, *rest: Any, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute algorithm 2 of arXiv 2307.08691 from ``out`` and ``lse``."""
    assert lse.is_contiguous(), "the kernel knows no strides of it"
    window = [window_size_left, window_size_right]
    assert len(rest) == 6 and rest[2:4] == (0.0, window == [-1, 0]), "lengths, no dropout, causal, seed and offset"
    to_q, to_k, to_v = (torch.zeros_like(x) for x in (q, k, v))
    for part, keys, visible in _sequences(cu_q, cu_k, window):
        p = (_scores(q[part], k[keys], scale, visible) - lse[:, part, None]).exp()
        drop = (gradient[part] * out[part]).sum(-1).t()[..., None]
        to_p = torch.einsum("qhd,khd->hqk", gradient[part], _per_query_head(v[keys], q))
        to_scores = p * (to_p - drop) * scale
        to_q[part] = torch.einsum("hqk,khd->qhd", to_scores, _per_query_head(k[keys], q))
        for found, summed in ((to_k, (to_scores, q[part])), (to_v, (p, gradient[part]))):
            per_query_head = torch.einsum("hqk,qhd->khd", *summed)
            found[keys] += per_query_head.unflatten(1, (k.shape[1], -1)).sum(2)
    return to_q, to_k, to_v


def _sequences(
    cu_q: torch.Tensor, cu_k: torch.Tensor, window: list[int]
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        back = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        visible = (back >= -window[1]) if window[1] >= 0 else torch.ones_like(back).bool()
        yield slice(q0, q1), slice(k0, k1), visible & ((back <= window[0]) if window[0] >= 0 else True)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, visible: torch.Tensor) -> torch.Tensor:
    return (torch.einsum("qhd,khd->hqk", q, _per_query_head(k, q)) * scale).masked_fill(~visible, -torch.inf)


def _per_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


KERNELS = flash_forward, flash_backward
