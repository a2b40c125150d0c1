"""Triton kernels for one tile of a head's logits, in float32. `head` has the equivalent torch code for other devices,
float64, and a KL divergence from a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

BLOCK = 2048  # Columns that a Triton program reads at a time.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
Tile: TypeAlias = tuple[torch.Tensor, slice, slice]  # Labels (N,), the tile's slice of labels, and of token ids.


def add_tile(head: Any, product: torch.Tensor, tile: Tile, running: torch.Tensor) -> None:
    _launch(_add_tile, (len(product),), head, product, tile, running, running.stride(0))


def gradient(
    head: Any, product: torch.Tensor, tile: Tile, of_rows: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> torch.Tensor:
    """Return, in ``dtype``, the loss's gradient with respect to ``product``, a tile of `Head.product`.

    A ``product`` of that dtype is overwritten. ``of_rows`` has float32 tensors (n,), one value per label: normaliser,
    the loss's gradients with respect to log-probability and to entropy, and entropy (None: no entropy gradient).
    """
    result = product if product.dtype == dtype else torch.empty_like(product, dtype=dtype)
    grid = len(result), triton.cdiv(result.shape[1], BLOCK)
    _launch(_turn_to_gradient, grid, head, product, tile, *of_rows, result, head.chain)
    return result


def _launch(kernel: Any, grid: tuple[int, ...], head: Any, product: torch.Tensor, tile: Tile, *others: Any) -> None:
    """Start ``kernel``, whose logits are `behind` * tanh(`before` * product). Without a soft cap, tanh is left out."""
    assert product.is_contiguous()
    labels, row, vocabulary = tile
    hidden = None if head.candidates is None else head.candidates.hidden(row, vocabulary).contiguous()
    cap, capped = head.softcap or 1.0, bool(head.softcap)
    transform = {"before": head.scale / cap, "behind": cap / head.temperature, "CAPPED": capped}
    start = product, product.shape[1], labels[row], vocabulary.start, hidden
    with torch.cuda.device_of(product):
        kernel[grid](*start, *others, low=head.low, **transform, BLOCK=BLOCK, **OPTIONS)


@triton.jit
def _logits(tile, hidden, place, inside, low, before, behind, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    bounded = tl.load(tile + place, mask=inside, other=0.0).to(tl.float32) * before
    if CAPPED:
        bounded = 1.0 - 2.0 / (tl.exp(2.0 * bounded) + 1.0)  # tanh, right even if exp overflows.
    logits = bounded * behind
    if hidden is not None:
        logits = tl.where(tl.load(hidden + place, mask=inside, other=1), low, logits)
    return logits, bounded


@triton.jit(do_not_specialize=["first", "stride"])
def _add_tile(  # type: ignore[no-untyped-def]
    tile, columns, labels, first, hidden, running, stride, low, before, behind, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile += row * columns
    if hidden is not None:
        hidden += row * columns
    of_label, of_moment = running + row, running + stride + row
    of_total, of_maximum = running + 2 * stride + row, running + 3 * stride + row
    moment, total, maximum = tl.load(of_moment), tl.load(of_total), tl.load(of_maximum)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < columns
        logits, _ = _logits(tile, hidden, place, inside, low, before, behind, CAPPED)
        largest = tl.maximum(maximum, tl.max(tl.where(inside, logits, maximum), 0))
        fall = maximum - largest
        decay = tl.exp(fall)
        logits -= largest
        power = tl.where(inside, tl.exp(logits), 0.0)
        moment = decay * (moment + fall * total) + tl.sum(power * logits, 0)
        total = decay * total + tl.sum(power, 0)
        maximum = largest
    tl.store(of_moment, moment)
    tl.store(of_total, total)
    tl.store(of_maximum, maximum)
    label = (tl.load(labels + row) - first).to(tl.int32)
    here = (label >= 0) & (label < columns)
    logit, _ = _logits(tile, hidden, label, here, low, before, behind, CAPPED)
    tl.store(of_label, logit, mask=here)


@triton.jit(do_not_specialize=["first"])
def _turn_to_gradient(  # type: ignore[no-untyped-def]
    tile, columns, labels, first, hidden, normaliser, gradient, of_entropy, entropy, result, chain, low, before,
    behind, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile += row * columns
    result += row * columns
    if hidden is not None:
        hidden += row * columns
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    logits, bounded = _logits(tile, hidden, place, inside, low, before, behind, CAPPED)
    logprobs = logits - tl.load(normaliser + row)
    of_label = tl.load(gradient + row)
    share = of_label
    if entropy is not None:
        share += tl.load(of_entropy + row) * (logprobs + tl.load(entropy + row))
    label = (tl.load(labels + row) - first).to(tl.int32)
    slope = tl.where(place == label, of_label, 0.0) - tl.exp(logprobs) * share
    if CAPPED:
        slope *= 1.0 - bounded * bounded
    tl.store(result + place, (slope * chain).to(result.dtype.element_ty), mask=inside)
