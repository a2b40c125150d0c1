"""LoRA policies (peft): the adapted layers, and the model inside the wrapper. The extension `lora` makes adapters.

The base stays as in the checkpoint: nothing here or in `weights/` ever merges the adapter into the policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import registry
from .packed_weights import packed_weight

PREFIX = "base_model.model."  # prefix of every parameter name of a PeftModel


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter that a run trains instead of the model's weights."""

    name: str  # peft's name of the adapter, usually `default`
    rank: int  # largest rank of its layers
    targets: tuple[str, ...]  # last names of the adapted layers: q_proj, down_proj, ...
    why_merged: str  # reason why vLLM can't serve it and gets merged weights instead; empty: vLLM can


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """Layer y = W x + scaling * B A x (LoRA, arXiv 2106.09685).

    With DoRA (arXiv 2402.09353, equation 5) each row of W + scaling * B A is scaled to a trained length. For a
    parameter of E experts, A has E times the rows and B has E times the columns.
    """

    name: str  # name in the model without adapters: model.layers.0.self_attn.q_proj, or ... .mlp.experts.down_proj
    parameter: str  # adapted parameter: model.layers.0.self_attn.q_proj.weight; for experts equal to ``name``
    module: Any  # peft's layer around the base's
    lora_a: torch.Tensor  # A, (rank, in); for an embedding (rank, vocabulary)
    lora_b: torch.Tensor  # B, (out, rank)
    scaling: float  # alpha / rank, or alpha / sqrt(rank) with rank-stabilised LoRA
    magnitude: torch.Tensor | None  # DoRA's row lengths, (out,); None without DoRA
    is_embedding: bool
    experts: int = 0  # number of experts E; 0: an ordinary layer

    @classmethod
    def of(cls, name: str, module: Any, adapter: str) -> AdaptedLayer:
        """Describe the layer that carries peft's ``adapter``; the tensors are the parameters themselves."""
        parameter = f"{name}.weight"
        if (own := getattr(module, "parameter_name", None)) is not None:  # peft nests such layers
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
        """Merge base and adapter into one matrix: a new float32 tensor in the base weight's layout."""
        if self.experts:
            base = self.module.get_param()
            a = self.lora_a.float().view(self.experts, -1, self.lora_a.shape[1])  # (E, rank, in)
            b = self.lora_b.float().view(len(self.lora_b), -1, self.experts).permute(2, 0, 1)  # (E, out, rank)
            delta = torch.bmm(b, a).mul_(self.scaling).view(-1, len(self.lora_b), self.lora_a.shape[1])
            if getattr(self.module.get_base_layer(), "is_transposed", False):
                delta = delta.transpose(1, 2)
            return (delta if base.dim() == 3 else delta[0]).add_(base)
        packed = packed_weight(self.module.get_base_layer())
        base = self.module.get_base_layer().weight if packed is None else packed.values()
        turned = self.is_embedding or getattr(self.module, "fan_in_fan_out", False)  # stored as (in, out)
        delta = (self.lora_b.float() @ self.lora_a.float()).mul_(self.scaling)
        weight = delta.add_(base.t() if turned else base)
        if self.magnitude is not None:
            weight.mul_((self.magnitude.float() / torch.linalg.norm(weight, dim=1))[:, None])
        return weight.t() if turned else weight


def is_adapted(model: Any) -> bool:
    """Return whether the model is a PeftModel."""
    return hasattr(type(model), "get_base_model")


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a PeftModel, or any other model unchanged."""
    return model.get_base_model() if is_adapted(model) else model


def base_name(name: str) -> str | None:
    """Return a parameter's name in the model without adapters; None for tensors that only the adapter has.

    ``base_model.model.lm_head.base_layer.weight`` -> ``lm_head.weight``; also for the engine's wrapped layers.
    """
    parts = name.removeprefix(PREFIX).split(".")
    if "modules_to_save" in parts or any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def adapted_layers(model: Any) -> list[AdaptedLayer]:
    """Return the layers of a PeftModel that carry its active adapter, in the model's order."""
    (adapter,) = model.active_adapters
    return [
        AdaptedLayer.of(name.removeprefix(PREFIX), module, adapter)
        for name, module in model.named_modules()
        if adapter in getattr(module, "lora_A", ()) or adapter in getattr(module, "lora_embedding_A", ())
    ]


def trained_copies(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model without adapters, parameter) of modules that peft trains whole (``modules_to_save``)."""
    (adapter,) = model.active_adapters
    for name, parameter in model.named_parameters():
        head, found, tail = name.partition(f".modules_to_save.{adapter}.")
        if found:
            yield f"{head.removeprefix(PREFIX)}.{tail}", parameter


def wrap(model: Any, peft_config: Any, seed: int) -> Any:
    """Make a PeftModel around ``model``, with a new adapter that is the same on every rank: seam ``wrap``."""
    registry.require("lora", "peft_config")
    (make,) = registry.hooks("wrap")
    return make(model, peft_config, seed)


def adapter_folder(path: str) -> dict[str, Any] | None:
    """Read the ``adapter_config.json`` of a folder that holds an adapter and no model; None for any other path."""
    file = os.path.join(path, "adapter_config.json")
    if not os.path.isfile(file) or os.path.isfile(os.path.join(path, "config.json")):
        return None
    with open(file, encoding="utf-8") as stream:
        return dict(json.load(stream))
