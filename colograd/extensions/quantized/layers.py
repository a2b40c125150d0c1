"""Quantised linear layers of bitsandbytes: their values, their products, and their size."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...policy.lora import packed_weights
from ...runtime.cpu_products import linear

PACKED = ("Params4bit", "Int8Params")
BLOCK = 64  # Number of 4-bit values that share a scale.
NESTED_BLOCK = 256  # With double quantisation: number of quantised scales that share a scale.


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Quantised weight (out, in) of a linear layer, as stored."""

    layer: Any  # bitsandbytes' Linear4bit or Linear8bitLt.

    @property
    def state(self) -> Any:
        """bitsandbytes' state of a 4-bit weight. None for an 8-bit weight."""
        return getattr(self.layer.weight, "quant_state", None)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.state or self.layer.weight).shape)

    @property
    def nbytes(self) -> int:
        scales = [self._row_scales] if self.state is None else [self.state.absmax]
        if self.state is not None and self.state.nested:
            scales += [self.state.state2.absmax, self.state.offset]
        return int(self.layer.weight.nbytes + sum(scale.nbytes for scale in scales))

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the dequantised weight (out, in). Default dtype: float32 for 8 bits, the compute dtype for 4 bits."""
        weight, state = self.layer.weight, self.state
        if state is None:
            return (weight.detach() * self._row_scales[:, None]).to(dtype or torch.float32)
        import bitsandbytes

        if self._has_broken_rows:  # As a single row, the matrix gets right scales.
            state = copy.copy(state)
            state.shape = torch.Size([1, math.prod(self.shape)])
        values = bitsandbytes.functional.dequantize_4bit(weight.data, state).reshape(self.shape)
        products = self.layer.compute_dtype or values.dtype
        return values.to(products).to(dtype or products)

    @property
    def _has_broken_rows(self) -> bool:
        """Whether the weight is on a CPU, in 4 bits, with blocks that span rows: bitsandbytes 0.50 misscales these."""
        is_host = self.layer.weight.device.type == "cpu"
        return is_host and self.state is not None and bool(self.shape[-1] % self.state.blocksize)

    @property
    def _row_scales(self) -> torch.Tensor:
        """An 8-bit weight's scales, one per row, (out,) float32. The first forward moves them to `layer.state`."""
        layer = self.layer
        largest = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
        return largest.detach().float() / 127

    @property
    def needs_exact_products(self) -> bool:
        return self.state is None or self._has_broken_rows

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T, (..., out), without bias."""
        given = x.to(getattr(self.layer, "compute_dtype", None) or x.dtype)
        if self.needs_exact_products:
            y = _Product.apply(given, self)
        else:
            import bitsandbytes

            y = bitsandbytes.matmul_4bit(given, self.layer.weight, quant_state=self.state)
        return y.to(x.dtype)


def packed_weight(module: Any) -> PackedWeight | None:
    """Return a layer's quantised weight, or None. peft's layer around a quantised layer has no such weight."""
    return PackedWeight(module) if type(module._parameters.get("weight")).__name__ in PACKED else None


def settle(model: Any) -> None:
    """Make the products of bitsandbytes' layers equal to products with the dequantised weights.

    By itself bitsandbytes repacks 4-bit weights on some CPUs, rounds the inputs of 8-bit layers, and uses wrong scales
    if `_has_broken_rows`.
    """
    if packed_weight(model.get_output_embeddings()) is not None:
        raise ValueError(
            "The language-model head is quantised, but logits are computed from its weight: name the head in the "
            "quantization_config's llm_int8_skip_modules, or remove this list. Without it the head isn't quantised."
        )
    for packed in packed_weights(model).values():
        packed.layer.support_avx512bf16_for_cpu = False
        if packed.needs_exact_products:
            packed.layer.forward = functools.partial(_exact_product, packed)


def _exact_product(packed: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    y, bias = packed.product(x), packed.layer.bias
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """Product x W^T with a gradient for x. Autograd saves no dequantised W."""

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
    """Return the bytes of a weight (out, in) after quantisation, including its scales."""
    numel = math.prod(shape)
    if not is_4bit(settings):
        return numel + 4 * shape[0]
    blocks = -(-numel // BLOCK)
    nested = settings.get("bnb_4bit_use_double_quant")
    return -(-numel // 2) + (blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if nested else 4 * blocks)


def to_pack(model: Any, settings: Mapping[str, Any]) -> dict[torch.Tensor, int]:
    """Return the packed bytes of each weight that transformers would quantise. ``model``: on the meta device."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(
        model, settings.get("llm_int8_skip_modules"), getattr(model, "_keep_in_fp32_modules", None)
    )
    # transformers' default leaves out the last module. If the head is tied, another module is last on the meta device.
    last, really_last = ([*model.named_parameters(remove_duplicate=of)][-1][0] for of in (True, False))
    if last != really_last:
        kept = [name for name in kept if name != last.rpartition(".")[0]]
    return {
        module.weight: packed_bytes(module.weight.shape, settings)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and should_convert_module(name, kept)
    }
