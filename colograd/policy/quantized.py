"""Quantised bases (QLoRA, arXiv 2305.14314): how one is asked for and loaded, and what its packed weights amount to.

The layers are bitsandbytes' of 4 and 8 bits. Their weights stay packed, frozen below an adapter; `PackedWeight.values`
is the matrix that the policy's products are computed with, in their precision, and what the engine is given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..config import GRPOConfig

METHOD = "bitsandbytes"  # the one that is available
PACKED = ("Params4bit", "Int8Params")  # its classes of parameters
BLOCK = 64  # values that share a scale with 4 bits
NESTED_BLOCK = 256  # scales that share one, where they are quantised too
FILE = "base_quantization.json"  # beside a saved adapter, whose base must be loaded in the same way


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a policy's base is quantised."""

    settings: Mapping[str, Any]  # as in a checkpoint's config.json
    in_checkpoint: bool  # what vLLM would load is packed already

    @property
    def name(self) -> str:
        """For people: `NF4`, `FP4` or `int8`."""
        return str(self.settings.get("bnb_4bit_quant_type", "fp4")).upper() if is_4bit(self.settings) else "int8"


def is_4bit(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("_load_in_4bit"))


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
        scales = _scales(self.layer)
        return int(self.layer.weight.nbytes + sum(scale.nbytes for scale in scales))

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The matrix that products are computed with, as a new tensor (out, in).

        Args:
            dtype: to which it is rounded at last; default: that of the products.
        """
        layer = self.layer
        if type(layer.weight).__name__ == "Int8Params":
            rows: torch.Tensor = _row_scales(layer)[:, None]
            return (layer.weight.detach() * rows).to(dtype or torch.float32)
        import bitsandbytes

        found: torch.Tensor = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        products = layer.compute_dtype or found.dtype
        return found.to(products).to(dtype or products)


def packed_weight(module: Any) -> PackedWeight | None:
    """Of a layer whose weight is quantised; None of any other module."""
    return PackedWeight(module) if type(getattr(module, "weight", None)).__name__ in PACKED else None


def packed_weights(model: torch.nn.Module) -> dict[str, PackedWeight]:
    """By the names of the parameters."""
    found = ((f"{name}.weight" if name else "weight", packed_weight(module)) for name, module in model.named_modules())
    return {name: packed for name, packed in found if packed is not None}


def dense_weight(module: Any) -> torch.Tensor:
    """A layer's weight, dequantised where it is packed."""
    packed = packed_weight(module)
    weight: torch.Tensor = module.weight if packed is None else packed.values()
    return weight


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


# -- loading


def asked_for(config: GRPOConfig) -> dict[str, Any] | None:
    """What ``model_init_kwargs`` asks for, as in a checkpoint's config.json; None: nothing.

    Where it doesn't say in which precision products are computed, in the policy's (transformers': float32).

    Raises:
        ValueError: of another kind than bitsandbytes', or of both 4 and 8 bits.
    """
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    found: Any = given.get("quantization_config")
    flags = {name: True for name in ("load_in_4bit", "load_in_8bit") if given.get(name)}
    if found is None and not flags:
        return None
    if found is not None and flags:
        raise ValueError(
            f"model_init_kwargs has quantization_config and {next(iter(flags))}: remove the second, which is an old "
            "name for it."
        )
    settings = {"quant_method": METHOD, **(flags if found is None else _as_settings(found))}
    check_method(settings, "quantization_config")
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)]
    if len(bits) != 1:
        raise ValueError(
            f"The base is to be quantised to {'4 and 8 bits' if bits else 'neither 4 nor 8 bits'}: set load_in_4bit or "
            "load_in_8bit, one of them."
        )
    if is_4bit(settings) and settings.get("bnb_4bit_compute_dtype") is None and config.policy_dtype != "auto":
        settings["bnb_4bit_compute_dtype"] = config.policy_dtype
    return settings


def take_quantization(config: GRPOConfig, model: Any, quantization_config: Any) -> None:
    """Put the trainer's argument where a recipe has it.

    Raises:
        ValueError: there is one already, or the model is loaded.
    """
    if quantization_config is None:
        return
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            "quantization_config is given, but the model is an object, loaded as it is: remove it, or give the model's "
            "name."
        )
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    if given.get("quantization_config") is not None:
        raise ValueError("quantization_config is given to the trainer and in model_init_kwargs: remove one of the two.")
    config.model_init_kwargs = {**given, "quantization_config": _as_settings(quantization_config)}


def _as_settings(found: Any) -> dict[str, Any]:
    return dict(found if isinstance(found, Mapping) else found.to_dict())


def saved_in(model_config: Any) -> dict[str, Any] | None:
    """The quantisation that a checkpoint's configuration names; None: its weights are whole."""
    found = getattr(model_config, "quantization_config", None)
    return None if found is None else _as_settings(found)


def check_method(settings: Mapping[str, Any], where: str) -> None:
    """
    Raises:
        ValueError: another one than bitsandbytes', with the remedy.
    """
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method != METHOD:
        raise ValueError(
            f"{where} has quant_method {method!r}, but a quantised base must be {METHOD}'s (4 or 8 bits), whose values "
            "the engine can be given: take the checkpoint in bfloat16, and quantise it with load_in_4bit: true, or "
            "train an adapter on it as it is."
        )
    if settings.get("llm_int8_has_fp16_weight"):
        raise ValueError(
            f"{where} sets llm_int8_has_fp16_weight, with which weights are quantised anew in each forward and the "
            "engine's would differ: remove it."
        )


def check_quantized(model_config: Any, config: GRPOConfig, by_name: bool, has_adapter: bool) -> None:
    """From the configurations alone, before weights are read.

    Args:
        model_config: the checkpoint's, or the given model's; None: it can't be read.
        by_name: it is to be loaded, rather than given as an object.

    Raises:
        ValueError: a base that can't be trained, with the value, the rule and the remedy.
    """
    saved, asked = saved_in(model_config), asked_for(config) if by_name else None
    if saved is not None:
        check_method(saved, "The model's configuration")
    settings = asked or saved
    if settings is None:
        return
    if not has_adapter:
        bits = "4" if is_4bit(settings) else "8"
        raise ValueError(
            f"The base is quantised to {bits} bits, but such weights can't be trained themselves: set use_peft: true "
            "(or give peft_config) to train an adapter on them, or take the model as it is."
        )
    if config.torch_compile:
        raise ValueError(
            "torch_compile is true, but layers whose weights are quantised aren't compiled in this version: remove it."
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"A quantised base needs bitsandbytes, which can't be imported ({error}): pip install bitsandbytes."
        ) from None


def load_arguments(config: GRPOConfig, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `from_pretrained` is given for a quantised base: it goes to the device as it is read, packed.

    Args:
        settings: that are asked for; None: the checkpoint's own.
    """
    from transformers import BitsAndBytesConfig

    asked = {} if settings is None else {"quantization_config": BitsAndBytesConfig.from_dict(dict(settings))}
    return {"device_map": {"": str(config.device)}, **asked}


def settle(model: Any) -> None:
    """Make a quantised model's products those of its dequantised weights, in training and evaluation alike.

    On some CPUs bitsandbytes packs 4-bit weights anew for a bfloat16 kernel when no gradient is wanted. Its 8-bit
    layers round their inputs to 8 bits too, which the engine doesn't.

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
        if type(layer.weight).__name__ == "Int8Params":
            layer.forward = _exact_products(packed)


def _exact_products(packed: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x, packed)
        return y if packed.layer.bias is None else y + packed.layer.bias.to(y.dtype)

    return forward


class _Product(torch.autograd.Function):
    """x W^T, with W dequantised for it and once more for its gradient, so that it isn't kept from one to the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        ctx.packed = packed
        return F.linear(x, packed.values(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.packed.values(gradient.dtype), None


# -- bytes


def packed_bytes(shape: tuple[int, ...] | torch.Size, settings: Mapping[str, Any]) -> int:
    """Of a weight (out, in) once it is quantised, with its scales.

    4 bits: half a byte each, and a float32 per block; with nested quantisation a byte per block, and a float32 per
    block of those. 8 bits: a byte each, and a float32 per row.
    """
    numel = math.prod(shape)
    if not is_4bit(settings):
        return numel + 4 * shape[0]
    blocks = -(-numel // BLOCK)
    nested = settings.get("bnb_4bit_use_double_quant")
    return -(-numel // 2) + (blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if nested else 4 * blocks)
