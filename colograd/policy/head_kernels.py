"""Triton kernels over one tile of a head's logits: its statistics in one pass, and its gradient in one pass.

They read the product of hidden states and weight in its own dtype, and compute in float32. `head` has the same sums in
torch, for other devices and dtypes and for a divergence from another distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048  # columns that a program reads at once
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a head's products. Their logits are behind * tanh(before * product), without the tanh if not capped."""

    product: torch.Tensor  # (n, c), contiguous
    labels: torch.Tensor  # (n,) int64
    first: int  # label of the first column
    hidden: torch.Tensor | None  # (n, c) bool, True for logits that are `low`
    low: float
    before: float
    behind: float
    capped: bool

    def add_to(self, running: torch.Tensor) -> None:
        """Add the tile to statistics of its rows, (4, n) float32: label's logit, moment, total, maximum."""
        self._launch(_add_tile, (len(self.product),), running, running.stride(0))

    def gradient(self, of_rows: Sequence[torch.Tensor | None], chain: float, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of the products in ``dtype``; it replaces them if that is theirs.

        Args:
            of_rows: normaliser, gradients of log-probability and entropy, and entropy, (n,) float32 each. Without the
                entropy its gradient isn't read.
            chain: derivative of the logits after the products, without the cap's.
        """
        result = self.product if self.product.dtype == dtype else torch.empty_like(self.product, dtype=dtype)
        grid = len(result), triton.cdiv(result.shape[1], BLOCK)
        self._launch(_turn_to_gradient, grid, *of_rows, result, chain)
        return result

    def _launch(self, kernel: Any, grid: tuple[int, ...], *others: Any) -> None:
        """Start a kernel on the tile's GPU, whichever is the thread's own."""
        assert self.product.is_contiguous()
        hidden = None if self.hidden is None else self.hidden.contiguous()
        columns = self.product.shape[1]
        transform = {"low": self.low, "before": self.before, "behind": self.behind, "CAPPED": self.capped}
        with torch.cuda.device_of(self.product):
            kernel[grid](
                self.product, columns, self.labels, self.first, hidden, *others, **transform, BLOCK=BLOCK, **OPTIONS
            )


@triton.jit
def _logits(tile, hidden, place, inside, low, before, behind, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read logits of a row's places: those used for sampling, and without the factor behind the cap."""
    bounded = tl.load(tile + place, mask=inside, other=0.0).to(tl.float32) * before
    if CAPPED:
        bounded = 1.0 - 2.0 / (tl.exp(2.0 * bounded) + 1.0)  # tanh; exp may be infinite
    logits = bounded * behind
    if hidden is not None:
        logits = tl.where(tl.load(hidden + place, mask=inside, other=1), low, logits)
    return logits, bounded


@triton.jit(do_not_specialize=["first", "stride"])
def _add_tile(  # type: ignore[no-untyped-def]
    tile,
    columns,
    labels,
    first,
    hidden,
    running,
    stride,
    low,
    before,
    behind,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
