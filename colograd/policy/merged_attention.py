"""Attention of a packed row by several calls of fused kernels. Call i returns, for each of its queries, an output o_i
and the log-sum-exp l_i of the query's scores. The results are merged into ``out`` and ``whole`` of the row:

    whole = log(sum of exp(l_i))    out = sum of exp(l_i - whole) o_i

The fused backward of call i is called with ``whole`` and ``out`` in place of l_i and o_i. From these it computes the
call's share of the gradients (arXiv 2307.08691, algorithm 2; as in ring attention, arXiv 2310.01889). A sink adds one
term to the sum in ``whole``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..batch import SegmentLayout
from ..runtime import cpu_products
from .sending import to_device_async

Places: TypeAlias = slice | torch.Tensor | None  # Indices of tokens. None means all tokens of a row.


@dataclass(frozen=True, slots=True)
class Call:
    queries: Places
    keys: Places
    causal: bool  # Whether attention is causal, with a sequence's last query at its last key.
    window: int | None = None  # Maximum number of keys that a query attends to. None: no limit.
    # For flash attention of N sequences: starts (N + 1,) of queries and keys, most queries and keys of a sequence.
    sequences: tuple[torch.Tensor, torch.Tensor, int, int] | None = None
    lengths: tuple[int, ...] = ()  # For CPU kernels: tokens of each sequence. Empty means one sequence.
    mask: torch.Tensor | None = None  # For CPU kernels: tensor to add to the scores of a single sequence.


class MergedAttention(torch.autograd.Function):
    """Attention of one packed row of T tokens with head size D: query and output (T, heads, D), sinks (heads,). The
    first of ``calls`` must have all queries of the row, in order."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None,
        calls: Sequence[Call], scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        out, whole = _attend(calls[0], _taken(calls[0], query, key, value), scale)
        for call in calls[1:]:
            assert call.queries is not None
            _merge(out, whole, call.queries, *_attend(call, _taken(call, query, key, value), scale))
        if sinks is not None:
            lse, whole = whole, torch.logaddexp(whole, sinks.float())
            out = out.mul_((lse - whole).exp_().unsqueeze(-1))
        ctx.save_for_backward(query, key, value, sinks, out, whole)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, whole = ctx.saved_tensors
        totals: list[torch.Tensor | None] = [None, None, None]
        for call in ctx.calls:
            rows = tuple(_at(x, call.queries) for x in (gradient, out, whole))
            added = _gradients(call, _taken(call, query, key, value), rows, ctx.scale)
            places = call.queries, call.keys, call.keys
            for index, (like, at, found) in enumerate(zip((query, key, value), places, added, strict=True)):
                if at is None:  # None means all tokens. Only the first call may have None.
                    totals[index] = found
                    continue
                total = totals[index]
                total = totals[index] = torch.zeros_like(like) if total is None else total
                if isinstance(at, torch.Tensor):
                    total.index_add_(0, at, found)
                else:
                    total[at] += found
        to_sinks = None
        if sinks is not None:
            seen = (out * gradient).sum(-1, dtype=torch.float32)
            to_sinks = -(torch.exp(sinks.float() - whole) * seen).sum(0).to(sinks.dtype)
        return *totals, to_sinks, None, None


def _at(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    if places is None:
        return tensor
    return tensor[places] if isinstance(places, slice) else tensor.index_select(0, places)


def _taken(call: Call, *row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(_at(x, places) for x, places in zip(row, (call.queries, call.keys, call.keys), strict=True))


def _merge(
    out: torch.Tensor, whole: torch.Tensor, places: slice | torch.Tensor, found: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge Q queries' output ``found`` (Q, heads, D) and log-sum-exp ``lse`` (Q, heads) into ``out`` and ``whole``."""
    before = _at(whole, places)
    together = torch.logaddexp(before, lse)
    merged = found * (lse - together).exp_().unsqueeze(-1)
    merged += _at(out, places) * (before - together).exp_().unsqueeze(-1)
    if isinstance(places, slice):
        out[places], whole[places] = merged, together
    else:
        out.index_copy_(0, places, merged.to(out.dtype))
        whole.index_copy_(0, places, together)


def _attend(call: Call, inputs: tuple[torch.Tensor, ...], scale: float | None) -> tuple[torch.Tensor, ...]:
    """Return the output (Q, heads, D) of a call with Q queries, and the log-sum-exp of its scores (Q, heads)."""
    if call.sequences is None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        options = {"attn_mask": call.mask, "scale": scale}
        return _joined(kernel(*row, 0.0, call.causal, **options) for row in _one_by_one(call, *inputs))
    causal, window = _window(call)
    out, lse, *_ = kernels()[0](*inputs, *call.sequences, 0.0, causal, False, scale=scale, **window)
    return out, lse.t()


def _gradients(
    call: Call, inputs: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...], scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Return a call's share of the loss's gradients with respect to ``inputs``. ``rows`` has the loss's gradient
    with respect to the merged output, the merged output, and the merged log-sum-exp."""
    if call.sequences is None:
        kernel, dtype = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, rows[0].dtype
        exact = torch.float32 if slow(rows[0]) else dtype
        cpu_options = {"attn_mask": None if call.mask is None else call.mask.to(exact), "scale": scale}
        found = []
        for *each, lse in _one_by_one(call, rows[0], *inputs, *rows[1:]):
            gradients = kernel(*(x.to(exact) for x in each), lse, 0.0, call.causal, **cpu_options)
            found.append(tuple(x.to(dtype) for x in gradients))
        return _joined(found)
    (gradient, out, whole), (causal, window) = rows, _window(call)
    none = out.new_zeros(2, dtype=torch.uint64)  # Stands for the dropout's random state.
    row = gradient, *inputs, out, whole.t().contiguous(), *call.sequences, 0.0, causal, none, none
    return tuple(kernels()[1](*row, scale=scale, **window))


def slow(query: torch.Tensor) -> bool:
    """Return whether the backward computes in float32. On a CPU without bfloat16 instructions torch's backward in
    bfloat16 takes up to seven times as long (`tests/benchmarks/attention.py`)."""
    return query.is_cpu and query.dtype == torch.bfloat16 and cpu_products.wanted()


def _one_by_one(call: Call, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split ``tensors`` (all tokens, heads, ...) by sequence. Yield a sequence's tensors (1, heads, tokens, ...)."""
    whole = [x.transpose(0, 1)[None] for x in tensors]
    return zip(*(x.split(call.lengths or x.shape[2], dim=2) for x in whole), strict=True)


def _joined(parts: Iterable[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    alike = ([x[0].transpose(0, 1) for x in each] for each in zip(*parts, strict=True))
    return tuple(torch.cat(each) if len(each) > 1 else each[0] for each in alike)


def _window(call: Call) -> tuple[bool, dict[str, int]]:
    left = -1 if call.window is None else call.window - 1
    sizes = {"window_size_left": left, "window_size_right": 0 if call.causal else -1}  # -1 means no limit.
    return call.causal and call.window is None, sizes  # With a window, `window_size_right` 0 hides later keys.


def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and backward of torch's flash attention.

    `torch.nn.attention.varlen` isn't used: since torch 2.14 it may call cuDNN. It isn't known whether
    cuDNN's backward accepts a merged output.
    """
    return torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


def blocks(layout: SegmentLayout) -> list[list[Call]]:
    """Return a list of calls for each index d. In list d, segment s attends to ``layout.attends_to[s][d]``, if any."""
    calls = []
    for depth in range(max(map(len, layout.attends_to), default=0)):
        names = [seen[depth] if depth < len(seen) else None for seen in layout.attends_to]
        runs = ((name, [*run]) for name, run in itertools.groupby(range(len(names)), names.__getitem__))
        calls.append(
            [Call(_tokens(layout, *run), _tokens(layout, name), False) for name, run in runs if name is not None]
        )
    return calls


def _tokens(layout: SegmentLayout, *segments: int) -> slice:
    starts = layout.starts
    return slice(starts[segments[0]], starts[segments[-1]] + layout.lengths[segments[-1]])


@functools.lru_cache(maxsize=16)
def calls_one_by_one(layout: SegmentLayout) -> tuple[Call, ...]:
    return Call(None, None, True, lengths=layout.lengths), *itertools.chain(*blocks(layout))


@functools.lru_cache(maxsize=16)
def calls_at_once(layout: SegmentLayout, window: int | None, device: torch.device) -> tuple[Call, ...]:
    """Return the calls for flash attention, which takes many sequences at once. With a ``window``, the last
    ``window`` - 1 earlier keys are copied in front of a segment's own keys: the kernel's window needs adjacent keys."""
    own = [_tokens(layout, segment) for segment in range(len(layout.lengths))]
    if window is None:
        calls = [Call(None, None, True, None, _sequences(own, own))]
        for depth in blocks(layout):
            queries, keys = ([getattr(call, name) for call in depth] for name in ("queries", "keys"))
            calls.append(Call(_places(queries), _places(keys), False, None, _sequences(queries, keys)))
    else:
        index: list[torch.Tensor] = []
        joined, at = [], 0
        for tokens, seen in zip(own, layout.attends_to, strict=True):
            earlier = torch.cat([_arange(_tokens(layout, s)) for s in seen] or [torch.arange(0)])
            index += [earlier[max(0, len(earlier) - window + 1) :], _arange(tokens)]
            joined.append(slice(at, at + len(index[-2]) + len(index[-1])))
            at = joined[-1].stop
        all_keys = torch.cat(index) if any(layout.attends_to) else None
        calls = [Call(None, all_keys, True, window, _sequences(own, joined))]
    # The tensors of all calls go to the device in one transfer.
    parts = [(call.queries, call.keys, *(call.sequences or ())) for call in calls]
    host = [part for of_call in parts for part in of_call if isinstance(part, torch.Tensor)]
    sent = iter(to_device_async(torch.cat(host), device).split([len(part) for part in host]))
    on_device = []
    for call, of_call in zip(calls, parts, strict=True):
        queries, keys, *starts = (next(sent) if isinstance(part, torch.Tensor) else part for part in of_call)
        sequences = (starts[0].to(torch.int32), starts[1].to(torch.int32), *starts[2:])
        on_device.append(Call(queries, keys, call.causal, call.window, sequences))
    return tuple(on_device)


def _places(parts: Sequence[slice]) -> slice | torch.Tensor:
    if all(one.stop == next_one.start for one, next_one in itertools.pairwise(parts)):
        return slice(parts[0].start, parts[-1].stop)
    return torch.cat([_arange(part) for part in parts])


def _arange(part: slice) -> torch.Tensor:
    return torch.arange(part.start, part.stop)


def _sequences(queries: Sequence[slice], keys: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    lengths = [[part.stop - part.start for part in parts] for parts in (queries, keys)]
    starts = [torch.tensor((0, *each)).cumsum(0) for each in lengths]
    return starts[0], starts[1], max(lengths[0]), max(lengths[1])
