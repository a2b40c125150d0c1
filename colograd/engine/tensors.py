"""Access to the tensors of vLLM's model: names, fused layers, renamed tensors, LoRA slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..policy.lora import base_name

AS_SAVED = ("TRITON", "BATCHED_TRITON", "CPU")  # Names of vLLM's kernels that read experts as checkpoints store them.
# Functions that vLLM's weight loaders apply to a checkpoint's tensors. Key: the last component of the tensor's name in
# the checkpoint, and of its name in vLLM.
FUNCTIONS: dict[tuple[str, str], Callable[[torch.Tensor], torch.Tensor]] = {
    ("A_log", "A"): lambda decay: -torch.exp(decay.float())  # Mamba's state matrix A is computed from A_log
}


class VLLMTensors:
    """Tensors of a vLLM model by name. ``model`` may be a model class: `fusions` and `renamed` need no tensors."""

    def __init__(self, model: torch.nn.Module | type) -> None:
        self._model: Any = model

    @functools.cached_property
    def fusions(self) -> Mapping[str, Sequence[str]]:
        """Names of the layers that vLLM fuses into one: ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``."""
        found: dict[str, Sequence[str]] = {}
        parts = [self._model] if isinstance(self._model, type) else self._model.modules()
        for part in parts:  # a multimodal class may list fused layers in its language model
            found = {**(getattr(part, "packed_modules_mapping", None) or _stacked(part)), **found}
        return found

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the parameters without LoRA adapters. Names are as in a model without adapters. Tied parameters have
        one entry."""
        named = ((base_name(name), parameter) for name, parameter in self._model.named_parameters())
        return {name: parameter for name, parameter in named if name is not None}

    def renamed(self, name: str) -> str:
        """Translate a tensor's name in a checkpoint into vLLM's name. A part of a fused layer keeps its own name, e.g.
        `q_proj`."""
        found = _renamed(self._model, name)
        for path, part in self._with_own_names.items():  # Gemma 3n's text model renames tensors a second time.
            if found not in self._names and found.startswith(path):
                inner = path + _renamed(part, found[len(path) :])
                found = inner if inner in self._names else found
        return found

    @functools.cached_property
    def _names(self) -> Collection[str]:
        return self.parameters()

    @functools.cached_property
    def _with_own_names(self) -> Mapping[str, torch.nn.Module]:
        parts = [] if isinstance(self._model, type) else self._model.named_modules()
        return {f"{name}.": part for name, part in parts if name and getattr(part, "hf_to_vllm_mapper", None)}

    def written_through(self, name: str, place: str | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function that turns checkpoint tensor ``name`` into vLLM tensor ``place``. None: a plain copy."""
        ends = name.rpartition(".")[2], (place or self.renamed(name)).rpartition(".")[2]
        return FUNCTIONS.get(ends)

    def _layer(self, name: str) -> Any:
        layers = {base_name(f"{path}.weight"): module for path, module in self._model.named_modules()}
        return layers.get(f"{name.rpartition('.')[0]}.weight")

    def expert_layout(self, name: str) -> str:
        """Return the name of the vLLM kernel if the kernel permutes the experts' tensor ``name``, else ""."""
        method = getattr(self._layer(name), "quant_method", None)
        kernel = getattr(getattr(method, "unquantized_backend", None), "name", AS_SAVED[0])
        return "" if kernel in AS_SAVED else str(kernel)

    def merged_outputs(self, name: str) -> Sequence[int]:
        """Return the output sizes of a fused layer's parts, summed over ranks. Empty for other layers."""
        return tuple(getattr(self._layer(name), "output_sizes", ()))

    def is_added_by_first_rank(self, bias: torch.Tensor) -> bool:
        return any(
            own.data_ptr() == bias.data_ptr()
            and any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__)
            for module in self._model.modules()
            if isinstance(own := getattr(module, "bias", None), torch.Tensor)
        )

    def lora_layers(self) -> dict[str, Any]:
        return dict(getattr(getattr(self._model, "lora_manager", None), "modules", {}))


def lora_stacks(layer: Any, kind: str) -> Sequence[torch.Tensor]:
    """Return a layer's LoRA slots of ``kind`` (``lora_A`` or ``lora_B``): one tensor [slots, 1, rows, columns] per
    fused part."""
    stacks: Sequence[torch.Tensor] = getattr(layer, f"{kind.lower()}_stacked")
    return stacks


def _renamed(model: Any, name: str) -> str:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if getattr(mapper, "orig_to_new_stacked", None):  # else the mapper would return `qkv_proj` for `q_proj`
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    return next(iter(mapper.apply_list([name])), name)


def _stacked(model: Any) -> dict[str, Sequence[str]]:
    """Return the fused layers of a model class that lists them only in `hf_to_vllm_mapper`, e.g. StableLM, GPT-J."""
    fusions: dict[str, list[str]] = {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for part, (fused, _) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
        part, fused = part.strip("."), fused.strip(".")
        if "." not in part + fused:
            fusions.setdefault(fused, []).append(part)
    return {fused: names for fused, names in fusions.items() if len(names) > 1}
