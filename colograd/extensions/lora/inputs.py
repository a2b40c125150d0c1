"""Less activation memory for float32 LoRA adapters on bfloat16 layers.

peft casts a layer's input to the adapter's dtype before the product with A. Autograd then saves a float32 copy of the
input for each of queries, keys and values. Here the product saves the uncast input, which the three layers share, and
casts the input again for A's gradient. The numbers don't change.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F

from ...policy.attention import autocast_dtype


def keep_inputs_as_they_are(model: torch.nn.Module) -> None:
    """Make each LoRA on a linear layer save its uncast input. With dropout or DoRA peft needs the cast input."""
    for layer in model.modules():
        inputs: Any = getattr(layer, "lora_A", None)
        if not inputs or getattr(layer, "lora_variant", None) or not hasattr(layer, "cast_input_dtype_enabled"):
            continue
        dropouts = (d for d in layer.lora_dropout.values() if not isinstance(d, torch.nn.Identity))
        drops = any(getattr(dropout, "p", 1.0) > 0 for dropout in dropouts)
        if all(type(a) is torch.nn.Linear for a in inputs.values()) and not drops:
            layer.cast_input_dtype_enabled = False
            for a in inputs.values():
                # Set a bound method, because a copy of the model then gets a method that is bound to the copy.
                a.forward = types.MethodType(_product, a)


def _product(a: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Compute the product A x of a LoRA, (..., rank), in A's dtype or autocast's dtype."""
    if x.dtype == a.weight.dtype or a.bias is not None or autocast_dtype(x.device) is not None:
        return F.linear(x.to(a.weight.dtype), a.weight, a.bias)
    found: torch.Tensor = _CastProduct.apply(x, a.weight)
    return found


class _CastProduct(torch.autograd.Function):
    """Product W x with x cast to W's dtype. The backward casts the saved x again for the gradient of W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = (gradient @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_x, None
        return to_x, gradient.flatten(0, -2).t() @ x.flatten(0, -2).to(weight.dtype)
