"""Quantised layers, bitsandbytes' of 4 and 8 bits: what their packed weights amount to (`PackedWeight.values`), which
the policy's products are computed with and the engine is given."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.cpu_products import linear

PACKED = ("Params4bit", "Int8Params")  # bitsandbytes' classes of parameters
BLOCK = 64  # values that share a scale with 4 bits
NESTED_BLOCK = 256  # scales that share one, where they are quantised too


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A layer's weight as it is stored; W of y = x W^T + b, (out, in)."""

    layer: Any  # bitsandbytes' Linear4bit or Linear8bitLt

    @property
    def shape(self) -> torch.Size:
        state = getattr(self.layer.weight, "quant_state", None)
        return torch.Size(self.layer.weight.shape if state is None else state.shape)

    @property
    def nbytes(self) -> int:
        """Of the values and their scales."""
        return int(self.layer.weight.nbytes + sum(scale.nbytes for scale in _scales(self.layer)))

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The matrix that products are computed with, as a new tensor (out, in), rounded at last to ``dtype``."""
        layer = self.layer
        if type(layer.weight).__name__ == "Int8Params":
            values: torch.Tensor = layer.weight.detach() * _row_scales(layer)[:, None]
            return values.to(dtype or torch.float32)
        found = _dequantised(layer.weight)
        products = layer.compute_dtype or found.dtype
        return found.to(products).to(dtype or products)

    @property
    def needs_exact_products(self) -> bool:
        """Whether bitsandbytes' own products are others than those with `values`."""
        return type(self.layer.weight).__name__ == "Int8Params" or _has_broken_rows(self.layer.weight)

    def precision(self, x: torch.Tensor) -> torch.dtype:
        """In which it is multiplied with ``x``."""
        found: torch.dtype = getattr(self.layer, "compute_dtype", None) or x.dtype
        return found

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T, (..., out), computed as the layer does."""
        layer = self.layer
        given = x.to(self.precision(x))
        if self.needs_exact_products:
            return linear(given, self.values(given.dtype)).to(x.dtype)
        import bitsandbytes

        y: torch.Tensor = bitsandbytes.matmul_4bit(given, layer.weight, quant_state=layer.weight.quant_state)
        return y.to(x.dtype)


def packed_weight(module: Any) -> PackedWeight | None:
    """Of a layer whose own weight is quantised; None of any other module (peft's, around it, show its weight too)."""
    return PackedWeight(module) if type(module._parameters.get("weight")).__name__ in PACKED else None


def packed_weights(model: torch.nn.Module) -> dict[str, PackedWeight]:
    """By the names of the parameters."""
    found = ((f"{name}.weight" if name else "weight", packed_weight(module)) for name, module in model.named_modules())
    return {name: packed for name, packed in found if packed is not None}


def dense_weight(module: Any) -> torch.Tensor:
    """A layer's weight, dequantised where it is packed."""
    packed = packed_weight(module)
    weight: torch.Tensor = module.weight if packed is None else packed.values()
    return weight


def _has_broken_rows(weight: Any) -> bool:
    """Whether a block of 4-bit values spans rows on a CPU, where bitsandbytes' kernel (0.50) takes wrong scales."""
    state = getattr(weight, "quant_state", None)
    return state is not None and weight.device.type == "cpu" and bool(state.shape[-1] % state.blocksize)


def _dequantised(weight: Any) -> torch.Tensor:
    """(out, in) of 4 bits."""
    import bitsandbytes

    state, shape = weight.quant_state, weight.quant_state.shape
    if _has_broken_rows(weight):  # all of it is one row
        state = copy.copy(state)
        state.shape = torch.Size([1, math.prod(shape)])
    found: torch.Tensor = bitsandbytes.functional.dequantize_4bit(weight.data, state)
    return found.reshape(shape)


def _scales(layer: Any) -> list[torch.Tensor]:
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return [_row_scales(layer)]
    nested = [state.state2.absmax, state.offset] if state.nested else []
    return [state.absmax, *nested]


def _row_scales(layer: Any) -> torch.Tensor:
    """(out,) float32 of an 8-bit layer: what an integer is times. They move to its state at its first forward."""
    largest = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return largest.detach().float() / 127


def settle(model: Any) -> None:
    """Make a quantised model's products those of its dequantised weights. bitsandbytes packs 4-bit weights anew for
    evaluation on some CPUs, rounds the inputs of 8-bit layers too, and see `_has_broken_rows`.

    Raises:
        ValueError: the head is quantised, whose weight logits are computed from in tiles.
    """
    head = model.get_output_embeddings()
    if packed_weight(head) is not None:
        raise ValueError(
            "The language-model head is quantised, but logits are computed from its weight: name it in "
            "llm_int8_skip_modules of the quantization_config, or leave that out."
        )
    for packed in packed_weights(model).values():
        layer = packed.layer
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        if packed.needs_exact_products:
            layer.forward = _exact_products(packed)


def _exact_products(packed: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x.to(packed.precision(x)), packed)
        return (y if packed.layer.bias is None else y + packed.layer.bias.to(y.dtype)).to(x.dtype)

    return forward


class _Product(torch.autograd.Function):
    """x W^T, with W dequantised for it and once more for its gradient, so that it isn't kept in between."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        ctx.packed = packed
        return linear(x, packed.values(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(gradient, ctx.packed.values(gradient.dtype).t()), None


def is_4bit(settings: Mapping[str, Any]) -> bool:
    """Rather than 8 bits, by the settings of a checkpoint's config.json."""
    return bool(settings.get("load_in_4bit") or settings.get("_load_in_4bit"))


def packed_bytes(shape: tuple[int, ...] | torch.Size, settings: Mapping[str, Any]) -> int:
    """Of a weight (out, in) once it is quantised. 4 bits: with a float32 per block; nested, a byte per block and a
    float32 per block of those. 8 bits: with a float32 per row."""
    numel = math.prod(shape)
    if not is_4bit(settings):
        return numel + 4 * shape[0]
    blocks = -(-numel // BLOCK)
    nested = settings.get("bnb_4bit_use_double_quant")
    return -(-numel // 2) + (blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if nested else 4 * blocks)
