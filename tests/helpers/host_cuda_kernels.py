"""Kernels that only CUDA has, in float32 sums, with the real kernels' demands on their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import varlen

T = torch.Tensor


def _check(query: T, key: T, value: T, *starts: T) -> None:
    for tensor in (query, key, value, *starts):
        assert tensor.is_cuda, "flash attention got a host tensor"
    assert query.dtype in (torch.bfloat16, torch.float16), "FlashAttention only support fp16 and bf16 data type"
    assert key.dtype == value.dtype == query.dtype, "query and key must have the same dtype"
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in starts), "cu_seqlens must be int32"
    assert all(each.stride(-1) == 1 for each in (query, key, value)), "must have contiguous last dimension"
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "head_size should be a multiple of 8, at most 256"


def _sequences(query: T, key: T, value: T, starts: tuple[T, T], options: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield each sequence's rows in queries and keys, its factors (heads, tokens, size), and its scaled scores."""
    causal, scale, left, right = options
    heads, times = query.shape[1], query.shape[1] // key.shape[1]
    ends = [each.cpu().tolist() for each in starts]
    for a, b, c, d in zip(ends[0][:-1], ends[0][1:], ends[1][:-1], ends[1][1:], strict=True):
        q = query[a:b].float().transpose(0, 1)
        k, v = (
            each[c:d].float().transpose(0, 1).repeat_interleave(times, 0, output_size=heads) for each in (key, value)
        )
        ahead = torch.arange(d - c) - torch.arange(b - a)[:, None] - (d - c - b + a)
        hidden = ahead > (0 if causal else right if right is not None and right >= 0 else 2**30)
        if left is not None and left >= 0:
            hidden |= ahead < -left
        yield slice(a, b), slice(c, d), q, k, v, (q @ k.mT * scale).masked_fill(hidden, -torch.inf)


def _forward(
    query: T, key: T, value: T, of_q: T, of_k: T, max_q: int, max_k: int, dropout: float, causal: bool, debug: bool,
    scale: Any = None, window_size_left: Any = None, window_size_right: Any = None, **_: Any,
) -> Any:  # fmt: skip
    _check(query, key, value, of_q, of_k)
    device, (query, key, value) = query.device, (each.cpu() for each in (query, key, value))  # not device memory
    out, lse = torch.zeros_like(query), query.new_full((query.shape[1], len(query)), torch.inf, dtype=torch.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = (causal, scale, window_size_left, window_size_right)
    for rows, _, _, _, v, scores in _sequences(query, key, value, (of_q, of_k), options):
        out[rows] = (scores.softmax(-1).nan_to_num(0) @ v).transpose(0, 1).to(out.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    empty = torch.empty(0, dtype=out.dtype, device=device)
    return out.to(device), lse.to(device), torch.zeros(2, dtype=torch.uint64, device=device), empty, empty


def _backward(
    gradient: T, query: T, key: T, value: T, out: T, lse: T, of_q: T, of_k: T, max_q: int, max_k: int, dropout: float,
    causal: bool, rng: T, unused: T, scale: Any = None, window_size_left: Any = None, window_size_right: Any = None,
    **_: Any,
) -> Any:  # fmt: skip
    _check(query, key, value, of_q, of_k)
    assert gradient.is_cuda and out.is_cuda and lse.is_cuda and lse.dtype == torch.float32
    device = query.device
    gradient, query, key, value, out, lse = (each.cpu() for each in (gradient, query, key, value, out, lse))
    to_q, to_k, to_v = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
    scale, times = query.shape[-1] ** -0.5 if scale is None else scale, query.shape[1] // key.shape[1]
    options = (causal, scale, window_size_left, window_size_right)
    for rows, columns, q, k, v, scores in _sequences(query, key, value, (of_q, of_k), options):
        of_rows, shares = gradient[rows].float().transpose(0, 1), (scores - lse[:, rows, None]).exp()
        inner = (of_rows * out[rows].float().transpose(0, 1)).sum(-1, keepdim=True)
        to_scores = shares * (of_rows @ v.mT - inner) * scale
        to_q[rows] = (to_scores @ k).transpose(0, 1)
        for whole, part in ((to_k, to_scores.mT @ q), (to_v, shares.mT @ of_rows)):
            whole[columns] = part.unflatten(0, (-1, times)).sum(1).transpose(0, 1)
    return tuple(each.to(query.dtype).to(device) for each in (to_q, to_k, to_v))


def _histc(values: T, bins: int = 100, low: float = 0, high: float = 0) -> T:
    return values.cpu().float().histc(bins, low, high).to(values.device, values.dtype)


def _grouped_mm(a: T, b: T, offs: T | None = None, bias: T | None = None, out_dtype: Any = None) -> T:
    factors = [None if tensor is None else tensor.cpu() for tensor in (a, b, offs, bias)]
    return torch.ops.aten._grouped_mm(*factors, out_dtype).to(a.device)


def install(record: Any) -> None:
    varlen._should_use_cudnn = lambda device: False
    kernels = torch.library.Library("aten", "IMPL", "CUDA")
    for name, kernel in (("_flash_attention_forward", _forward), ("_flash_attention_backward", _backward)):
        kernels.impl(name, record.as_kernel(kernel, name))
    # products in another dtype than their factors
    kernels.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))
    kernels.impl(
        "addmm.dtype", lambda c, a, b, dtype, beta=1, alpha=1: beta * c.to(dtype) + alpha * (a.to(dtype) @ b.to(dtype))
    )
    kernels.impl("bmm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))
    kernels.impl("histc", record.as_kernel(_histc, "histc"))  # the CPU's takes no integers
    kernels.impl("_grouped_mm", record.as_kernel(_grouped_mm, "_grouped_mm"))  # the CPU's asks for the offsets
    record._kernel_library = kernels
