"""LoRA policies (peft): layers with an adapter, the model inside a PeftModel, and quantised weights of a base model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..runtime import registry

PREFIX = "base_model.model."  # Prefix of every parameter name in a PeftModel.

PackedWeight: TypeAlias = Any  # A packed (e.g. quantised) weight (out, in), as in `quantized/layers.py`.


def packed_weight(module: Any) -> PackedWeight | None:
    """Return a layer's packed (e.g. quantised) weight, or None. Extensions find the weight (hook "packed_weight")."""
    found = (find(module) for find in registry.hooks("packed_weight"))
    return next((packed for packed in found if packed is not None), None)


def packed_weights(model: torch.nn.Module) -> dict[str, PackedWeight]:
    found = ((f"{name}.weight" if name else "weight", packed_weight(module)) for name, module in model.named_modules())
    return {name: packed for name, packed in found if packed is not None}


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    rank: int  # Largest LoRA rank among the layers.
    targets: tuple[str, ...]  # Last parts of the names of layers with an adapter: q_proj, down_proj, ...
    why_merged: str  # Reason why vLLM gets merged weights in place of the adapter. Empty: vLLM gets the adapter.


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer with a LoRA adapter: input x, base weight W, adapter matrices A and B, output W x + scaling * B A x
    (arXiv 2106.09685). DoRA scales each row of the matrix W + scaling * B A to a trained length (arXiv 2402.09353,
    eq. 5). For E experts, A has shape (E * rank, in) and B has shape (out, rank * E)."""

    name: str  # Name of the layer in the model without adapters, e.g. model.layers.0.self_attn.q_proj.
    parameter: str  # Name of the layer's weight, e.g. model.layers.0.self_attn.q_proj.weight. For experts: like `name`.
    module: Any  # peft's layer around the base model's layer.
    lora_a: torch.Tensor  # Matrix A, (rank, in), or (rank, vocabulary) for an embedding.
    lora_b: torch.Tensor  # Matrix B, (out, rank).
    scaling: float  # Factor alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA.
    magnitude: torch.Tensor | None  # Row lengths of DoRA, (out,). None: no DoRA.
    is_embedding: bool
    experts: int = 0  # Number of experts E, or 0.

    @classmethod
    def of(cls, name: str, module: Any, adapter: str) -> AdaptedLayer:
        parameter = f"{name}.weight"
        if (own := getattr(module, "parameter_name", None)) is not None:  # Experts: peft nests a layer per parameter.
            name = parameter = ".".join([*(part for part in name.split(".") if part != "base_layer"), own])
        scaling, magnitudes = float(module.scaling[adapter]), getattr(module, "lora_magnitude_vector", None) or {}
        magnitude = magnitudes[adapter].weight if adapter in magnitudes else None
        if adapter in module.lora_embedding_A:
            a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
            return cls(name, parameter, module, a, b, scaling, magnitude, is_embedding=True)
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        experts = 0 if own is None else module.num_experts
        return cls(name, parameter, module, a, b, scaling, magnitude, is_embedding=False, experts=experts)

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return the layer's weight with the adapter merged into it, as a new float32 tensor."""
        if self.experts:
            base = self.module.get_param()
            a = self.lora_a.float().view(self.experts, -1, self.lora_a.shape[1])  # A: (experts, rank, in).
            b = self.lora_b.float().view(len(self.lora_b), -1, self.experts).permute(2, 0, 1)  # B: (experts, out, rank)
            delta = torch.bmm(b, a).mul_(self.scaling).view(-1, len(self.lora_b), self.lora_a.shape[1])
            if getattr(self.module.get_base_layer(), "is_transposed", False):
                delta = delta.transpose(1, 2)
            return (delta if base.dim() == 3 else delta[0]).add_(base)
        packed = packed_weight(self.module.get_base_layer())
        base = self.module.get_base_layer().weight if packed is None else packed.values()
        turned = self.is_embedding or getattr(self.module, "fan_in_fan_out", False)  # Weight is stored as (in, out).
        delta = (self.lora_b.float() @ self.lora_a.float()).mul_(self.scaling)
        weight = delta.add_(base.t() if turned else base)
        if self.magnitude is not None:
            weight.mul_((self.magnitude.float() / torch.linalg.norm(weight, dim=1))[:, None])
        return weight.t() if turned else weight


def is_adapted(model: Any) -> bool:
    return hasattr(type(model), "get_base_model")


def unwrap(model: Any) -> Any:
    return model.get_base_model() if is_adapted(model) else model


def base_name(name: str) -> str | None:
    """Convert a name in a PeftModel or in vLLM's LoRA layers, e.g. ``base_model.model.lm_head.base_layer.weight``, to
    the name in the model without adapters, ``lm_head.weight``. None: a tensor of the adapter."""
    parts = name.removeprefix(PREFIX).split(".")
    if "modules_to_save" in parts or any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def adapted_layers(model: Any) -> list[AdaptedLayer]:
    (adapter,) = model.active_adapters
    return [
        AdaptedLayer.of(name.removeprefix(PREFIX), module, adapter)
        for name, module in model.named_modules()
        if adapter in getattr(module, "lora_A", ()) or adapter in getattr(module, "lora_embedding_A", ())
    ]


def trained_copies(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model without adapters, parameter) for peft's copies of whole modules (modules_to_save)."""
    (adapter,) = model.active_adapters
    for name, parameter in model.named_parameters():
        head, found, tail = name.partition(f".modules_to_save.{adapter}.")
        if found:
            yield f"{head.removeprefix(PREFIX)}.{tail}", parameter


def wrap(model: Any, peft_config: Any, seed: int) -> Any:
    """Return a PeftModel around ``model`` with a new adapter. Equal seeds give equal adapters on all ranks."""
    registry.require("lora", "peft_config")
    (make,) = registry.hooks("wrap")
    return make(model, peft_config, seed)


def adapter_folder(path: str) -> dict[str, Any] | None:
    """Return the content of ``adapter_config.json`` in a folder that holds an adapter but no model, else None."""
    file = Path(path, "adapter_config.json")
    if not file.is_file() or Path(path, "config.json").is_file():
        return None
    return dict(json.loads(file.read_text(encoding="utf-8")))
