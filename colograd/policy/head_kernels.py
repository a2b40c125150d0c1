"""Triton kernels over one tile of a head's logits: its statistics in one pass, and its gradient in one pass.

They read the product of hidden states and weight in its own dtype, and compute in float32. `head` has the same sums in
torch, for other devices and dtypes and for a divergence from another distribution.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import head as policy_head

HIDDEN = tl.constexpr(policy_head.HIDDEN)
BLOCK = 2048  # columns that a program reads at once
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


def add_tile(
    head: policy_head.Head,
    tile: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    hidden: torch.Tensor | None,
    running: torch.Tensor,
) -> None:
    """Add a tile to the running statistics of its rows.

    Args:
        tile: (n, c) `Head.product`.
        labels: (n,) int64.
        first: place of the tile's first column among the labels.
        hidden: (n, c) bool, True for tokens outside the labels' candidates.
        running: (4, n) float32, rows of a contiguous tensor: label's logit, moment, total, maximum.
    """
    with torch.cuda.device_of(tile):
        _add_tile[(len(tile),)](
            *_of_tile(tile, labels, first, hidden), running, running.stride(0), **_of_head(head), **OPTIONS
        )


def turn_to_gradient(
    head: policy_head.Head,
    tile: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    hidden: torch.Tensor | None,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    of_entropy: torch.Tensor,
    entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of `Head.product`, in the tile's memory if ``dtype`` is its own.

    Args:
        gradient: (n,) float32, gradient of the log-probabilities.
        of_entropy: (n,) float32, gradient of the entropies.
        entropy: (n,) float32; None: they are constants.
    """
    result = tile if tile.dtype == dtype else torch.empty_like(tile, dtype=dtype)
    grid = len(tile), triton.cdiv(tile.shape[1], BLOCK)
    with torch.cuda.device_of(tile):
        _turn_to_gradient[grid](
            *_of_tile(tile, labels, first, hidden), normaliser, gradient, of_entropy, entropy, result,
            head.scale / head.temperature, **_of_head(head), **OPTIONS,
        )  # fmt: skip
    return result


def _of_tile(tile: torch.Tensor, labels: torch.Tensor, first: int, hidden: torch.Tensor | None) -> tuple[Any, ...]:
    assert tile.is_contiguous()
    return tile, tile.shape[1], labels, first, None if hidden is None else hidden.contiguous()


def _of_head(head: policy_head.Head) -> dict[str, Any]:
    """Return the head's transform: a factor before the cap, one behind it, and whether there is a cap."""
    cap = head.softcap or 1.0
    return {
        "before": head.scale / cap,
        "behind": cap / head.temperature,
        "CAPPED": bool(head.softcap),
        "BLOCK": BLOCK,
    }


@triton.jit
def _logits(tile, hidden, place, inside, before, behind, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read logits of a row's places: those used for sampling, and without the factor behind the cap."""
    bounded = tl.load(tile + place, mask=inside, other=0.0).to(tl.float32) * before
    if CAPPED:
        bounded = 1.0 - 2.0 / (tl.exp(2.0 * bounded) + 1.0)  # tanh; exp may be infinite
    logits = bounded * behind
    if hidden is not None:
        logits = tl.where(tl.load(hidden + place, mask=inside, other=1), HIDDEN, logits)
    return logits, bounded


@triton.jit(do_not_specialize=["first", "stride"])
def _add_tile(  # type: ignore[no-untyped-def]
    tile, columns, labels, first, hidden, running, stride, before, behind, CAPPED: tl.constexpr, BLOCK: tl.constexpr
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
        logits, _ = _logits(tile, hidden, place, inside, before, behind, CAPPED)
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
    logit, _ = _logits(tile, hidden, label, here, before, behind, CAPPED)
    tl.store(of_label, logit, mask=here)


@triton.jit(do_not_specialize=["first"])
def _turn_to_gradient(  # type: ignore[no-untyped-def]
    tile, columns, labels, first, hidden, normaliser, gradient, of_entropy, entropy, result, chain, before, behind,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile += row * columns
    result += row * columns
    if hidden is not None:
        hidden += row * columns
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    logits, bounded = _logits(tile, hidden, place, inside, before, behind, CAPPED)
    logprobs = logits - tl.load(normaliser + row)
    of_label = tl.load(gradient + row)
    share = of_label
    if entropy is not None:
        share += tl.load(of_entropy + row) * (logprobs + tl.load(entropy + row))
    label = (tl.load(labels + row) - first).to(tl.int32)
    found = tl.where(place == label, of_label, 0.0) - tl.exp(logprobs) * share
    if CAPPED:
        found *= 1.0 - bounded * bounded
    tl.store(result + place, (found * chain).to(result.dtype.element_ty), mask=inside)
