"""Faster bfloat16 matrix products on CPUs without bfloat16 instructions.

On such a CPU torch's bfloat16 products use plain loops, 20 to 40 times slower than in float32. Here the factors
are cast to float32, and the result is rounded to bfloat16 once.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

import psutil
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from . import process

CAST_ELEMENTS = 2**20  # 4 MiB in float32, which fits a core's caches
FEW_ROWS = 8  # With fewer rows torch's loops are faster than casting the weight.


@functools.cache
def wanted() -> bool:
    """Return whether this CPU lacks instructions for bfloat16 products, according to torch's library oneDNN."""
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def take_over(model: torch.nn.Module) -> None:
    if not wanted():
        return
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and "forward" not in layer.__dict__:
            layer.forward = types.MethodType(_forward, layer)  # bound, so that a copied layer uses its own weights


def give_back(layer: torch.nn.Module) -> None:
    if getattr(layer.__dict__.get("forward"), "__func__", None) is _forward:
        del layer.forward


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight, layer.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`. If `wanted()`, multiply bfloat16 CPU tensors in float32 where faster."""
    if not x.is_cpu or not wanted():
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        x, weight = x.bfloat16(), weight.bfloat16()
        bias = None if bias is None else bias.bfloat16()
    if not x.dtype == weight.dtype == torch.bfloat16 or x.numel() < FEW_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    if _copies is not None and not torch.is_grad_enabled():
        return _product(x, _copy_of(weight), bias)
    product: torch.Tensor = _Linear.apply(x, weight, bias)
    return product


# A parameter and its float32 copy, by the parameter's id. None outside `constant_weights`.
_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
_room = 0  # Bytes left for further float32 copies.


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """Let `linear` keep float32 copies of weights. In this context the weights must not change. Decoding multiplies by
    each weight once per step, and casts would take a quarter of decoding's time."""
    global _copies, _room
    if not wanted():
        yield
        return
    # The copies take at most a quarter of the rank's available memory.
    before, _copies, _room = _copies, {}, psutil.virtual_memory().available // 4 // process.local_world_size()
    try:
        yield
    finally:
        _copies = before


def _copy_of(weight: torch.Tensor) -> torch.Tensor:
    global _room
    assert _copies is not None
    if not isinstance(weight, torch.nn.Parameter):  # Other tensors may be temporary, and Python reuses ids.
        return weight
    if id(weight) not in _copies and (nbytes := 4 * weight.numel()) <= _room:
        _copies[id(weight)], _room = (weight, weight.detach().float()), _room - nbytes
    return _copies.get(id(weight), (weight, weight))[1]


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    rows = max(1, CAST_ELEMENTS // max(weight.shape[1], 1))
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide, exact = x.float(), None if bias is None else bias.float()
    with torch.autocast("cpu", enabled=False):
        if weight.numel() <= CAST_ELEMENTS:
            return F.linear(wide, weight.float(), exact).to(x.dtype)
        product = x.new_empty((*x.shape[:-1], len(weight)))
        for part in _parts(weight):
            product[..., part] = F.linear(wide, weight[part].float(), None if exact is None else exact[part])
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)  # type: ignore[attr-defined]
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows = gradient.flatten(0, -2).float()
        to_x = to_weight = to_bias = None
        if needs_x:
            summed = rows.new_zeros((len(rows), x.shape[-1]))
            for part in _parts(weight):
                summed.addmm_(rows[:, part], weight[part].float())
            to_x = summed.to(x.dtype).view_as(x)
        if needs_weight:
            to_weight, states = torch.empty_like(weight), x.flatten(0, -2).float()
            for part in _parts(weight):
                to_weight[part] = rows[:, part].t() @ states
        if needs_bias:
            to_bias = rows.sum(dim=0).to(bias.dtype)
        return to_x, to_weight, to_bias
