"""Faster bfloat16 matrix products on CPUs without bfloat16 instructions.

On such a CPU torch uses plain loops, 20 to 40 times slower than float32 products with their gradients. Here the factors
are cast to float32, the weight in pieces, and the result is rounded once, as kernels do that sum in float32.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CAST_ELEMENTS = 2**20  # Elements of a weight per cast: 4 MiB in float32, which fits a core's caches.
FEW_ROWS = 8  # With fewer rows torch's loops are faster than casting the weight.


@functools.cache
def wanted() -> bool:
    """Return whether this CPU lacks instructions for bfloat16 products, by oneDNN, which torch uses for them."""
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def take_over(model: torch.nn.Module) -> None:
    """Replace the forward of a CPU model's linear layers by `linear`, if the CPU lacks bfloat16 instructions."""
    if not wanted():
        return
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and "forward" not in layer.__dict__:
            layer.forward = types.MethodType(_forward, layer)  # A method of the layer: a copied layer gets its own.


def give_back(layer: torch.nn.Module) -> None:
    if getattr(layer.__dict__.get("forward"), "__func__", None) is _forward:
        del layer.forward


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight, layer.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, with faster bfloat16 products on a CPU. Respects autocast."""
    if not x.is_cpu or not wanted():
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        x, weight = x.bfloat16(), weight.bfloat16()
        bias = None if bias is None else bias.bfloat16()
    if not x.dtype == weight.dtype == torch.bfloat16 or x.numel() < FEW_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    found: torch.Tensor = _Linear.apply(x, weight, bias)
    return found


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    rows = max(1, CAST_ELEMENTS // max(weight.shape[1], 1))
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)  # type: ignore[attr-defined]
        given, exact = x.float(), None if bias is None else bias.float()
        with torch.autocast("cpu", enabled=False):
            if weight.numel() <= CAST_ELEMENTS:
                return F.linear(given, weight.float(), exact).to(x.dtype)
            found = x.new_empty((*x.shape[:-1], len(weight)))
            for part in _parts(weight):
                found[..., part] = F.linear(given, weight[part].float(), None if exact is None else exact[part])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        given = gradient.flatten(0, -2).float()
        to_x = to_weight = to_bias = None
        if needs_x:
            summed = given.new_zeros((len(given), x.shape[-1]))
            for part in _parts(weight):
                summed.addmm_(given[:, part], weight[part].float())
            to_x = summed.to(x.dtype).view_as(x)
        if needs_weight:
            to_weight, states = torch.empty_like(weight), x.flatten(0, -2).float()
            for part in _parts(weight):
                to_weight[part] = given[:, part].t() @ states
        if needs_bias:
            to_bias = given.sum(dim=0).to(bias.dtype)
        return to_x, to_weight, to_bias
