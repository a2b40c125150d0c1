"""Quantised linear layers of bitsandbytes with 4 and 8 bits.

The policy's and the engine's products equal products with the dequantised weights (`PackedWeight.values`).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...policy.lora import packed_weights as packed_weights
from ...runtime.cpu_products import linear

PACKED = ("Params4bit", "Int8Params")  # Names of bitsandbytes' classes of quantised parameters.
BLOCK = 64  # Number of 4-bit values that share a scale.
NESTED_BLOCK = 256  # With double quantisation: number of quantised scales that share a scale.


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Quantised weight of a linear layer, as stored: W of y = x W^T + b, (out, in)."""

    layer: Any  # A Linear4bit or Linear8bitLt of bitsandbytes.

    @property
    def shape(self) -> torch.Size:
        state = getattr(self.layer.weight, "quant_state", None)
        return torch.Size(self.layer.weight.shape if state is None else state.shape)

    @property
    def nbytes(self) -> int:
        state = getattr(self.layer.weight, "quant_state", None)
        scales = [_row_scales(self.layer)] if state is None else [state.absmax]
        if state is not None and state.nested:
            scales += [state.state2.absmax, state.offset]
        return int(self.layer.weight.nbytes + sum(scale.nbytes for scale in scales))

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Dequantise the weight into a new tensor (out, in) of ``dtype``. None means the dtype of a 4-bit layer's
        products, and float32 for an 8-bit layer."""
        layer, weight = self.layer, self.layer.weight
        if type(weight).__name__ == "Int8Params":
            values: torch.Tensor = weight.detach() * _row_scales(layer)[:, None]
            return values.to(dtype or torch.float32)
        import bitsandbytes

        state, shape = weight.quant_state, weight.quant_state.shape
        if _has_broken_rows(weight):  # As one row, the matrix is dequantised with the right scales.
            state = copy.copy(state)
            state.shape = torch.Size([1, math.prod(shape)])
        found: torch.Tensor = bitsandbytes.functional.dequantize_4bit(weight.data, state).reshape(shape)
        products = layer.compute_dtype or found.dtype
        return found.to(products).to(dtype or products)

    @property
    def needs_exact_products(self) -> bool:
        """Whether bitsandbytes' product differs by more than rounding from a product with the dequantised weight."""
        return type(self.layer.weight).__name__ == "Int8Params" or _has_broken_rows(self.layer.weight)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Convert ``x`` to the layer's compute dtype. Without one, return ``x`` unchanged."""
        return x.to(getattr(self.layer, "compute_dtype", None) or x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T, (..., out), with the numbers of the policy's layer but without its bias."""
        layer, given = self.layer, self.cast(x)
        if self.needs_exact_products:
            return linear(given, self.values(given.dtype)).to(x.dtype)
        import bitsandbytes

        y: torch.Tensor = bitsandbytes.matmul_4bit(given, layer.weight, quant_state=layer.weight.quant_state)
        return y.to(x.dtype)


def packed_weight(module: Any) -> PackedWeight | None:
    """Return a layer's quantised weight. None for all other modules, including peft's wrapper of a quantised layer."""
    return PackedWeight(module) if type(module._parameters.get("weight")).__name__ in PACKED else None


def _has_broken_rows(weight: Any) -> bool:
    """Return whether 4-bit blocks of a weight on a CPU span two rows, where bitsandbytes (0.50) uses wrong scales."""
    state = getattr(weight, "quant_state", None)
    return state is not None and weight.device.type == "cpu" and bool(state.shape[-1] % state.blocksize)


def _row_scales(layer: Any) -> torch.Tensor:
    """Return an 8-bit weight's scale per row, (out,) float32. A layer's first forward moves scales to its state."""
    largest = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return largest.detach().float() / 127


def settle(model: Any) -> None:
    """Make a quantised model's products equal products with its dequantised weights. bitsandbytes' products differ in
    three cases: on some CPUs it repacks 4-bit weights for evaluation, in 8-bit layers it rounds the inputs, too, and
    `_has_broken_rows` is the third case. Raise a ValueError if the head is quantised."""
    head = model.get_output_embeddings()
    if packed_weight(head) is not None:
        raise ValueError(
            "The language-model head is quantised, but logits are computed from its weight: name the head in "
            "llm_int8_skip_modules of the quantization_config, or remove llm_int8_skip_modules."
        )
    for module in model.modules():
        if (packed := packed_weight(module)) is None:
            continue
        layer = packed.layer
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        if packed.needs_exact_products:
            layer.forward = functools.partial(_exact_product, packed)


def _exact_product(packed: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _Product.apply(packed.cast(x), packed)
    return (y if packed.layer.bias is None else y + packed.layer.bias.to(y.dtype)).to(x.dtype)


class _Product(torch.autograd.Function):
    """Product x W^T with a gradient for x. Forward and backward each dequantise W, so autograd saves no such tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        ctx.packed = packed
        return linear(x, packed.values(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(gradient, ctx.packed.values(gradient.dtype).t()), None


def is_4bit(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("_load_in_4bit"))


def packed_bytes(shape: tuple[int, ...] | torch.Size, settings: Mapping[str, Any]) -> int:
    """Return the bytes of a weight (out, in) after quantisation, including its scales. With 4 bits a block of 64 values
    has a float32 scale. With double quantisation a scale has one byte, and 256 scales share a float32. With 8 bits a
    row has a float32 scale."""
    numel = math.prod(shape)
    if not is_4bit(settings):
        return numel + 4 * shape[0]
    blocks = -(-numel // BLOCK)
    nested = settings.get("bnb_4bit_use_double_quant")
    return -(-numel // 2) + (blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if nested else 4 * blocks)


def to_pack(model: Any, settings: Mapping[str, Any]) -> dict[torch.Tensor, int]:
    """Return the weights of a model on the meta device that transformers would quantise, each with its packed bytes.
    transformers quantises all linear layers except those that must stay float32, and those that ``settings`` skip. If
    ``settings`` have no `llm_int8_skip_modules`, the head is skipped."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(
        model, settings.get("llm_int8_skip_modules"), getattr(model, "_keep_in_fp32_modules", None)
    )
    # By default transformers skips the last module. With a tied head a model on the meta device ends with another one.
    last, really_last = ([*model.named_parameters(remove_duplicate=of)][-1][0] for of in (True, False))
    if last != really_last:
        kept = [name for name in kept if name != last.rpartition(".")[0]]
    return {
        module.weight: packed_bytes(module.weight.shape, settings)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and should_convert_module(name, kept)
    }
