"""`EngineTensors` of vLLM's model: tensors by name, fusions, renamings, LoRA slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..policy.lora import base_name

AS_SAVED = ("TRITON", "BATCHED_TRITON", "CPU")  # vLLM's kernels that read experts in a checkpoint's layout
# Functions that vLLM's weight loaders apply, by the last parts of the checkpoint's name and of vLLM's.
FUNCTIONS: dict[tuple[str, str], Callable[[torch.Tensor], torch.Tensor]] = {
    ("A_log", "A"): lambda decay: -torch.exp(decay.float())  # Mamba's state matrix
}


class VLLMTensors:
    """The tensors of a vLLM model. The model's class is enough for `fusions` and `renamed`."""

    def __init__(self, model: torch.nn.Module | type) -> None:
        self._model: Any = model

    @functools.cached_property
    def fusions(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, Sequence[str]] = {}
        parts = [self._model] if isinstance(self._model, type) else self._model.modules()
        for part in parts:  # a multimodal class may leave fusions to its language model
            found = {**(getattr(part, "packed_modules_mapping", None) or _stacked(part)), **found}
        return found

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        named = ((base_name(name), parameter) for name, parameter in self._model.named_parameters())
        return {name: parameter for name, parameter in named if name is not None}

    def renamed(self, name: str) -> str:
        found = _renamed(self._model, name)
        for path in self._with_own_names:  # submodels with a loader that renames again: Gemma 3n's text model
            if found not in self._names and found.startswith(path):
                inner = path + _renamed(self._model.get_submodule(path[:-1]), found[len(path) :])
                found = inner if inner in self._names else found
        return found

    @functools.cached_property
    def _names(self) -> Collection[str]:
        return {} if isinstance(self._model, type) else self.parameters()

    @functools.cached_property
    def _with_own_names(self) -> Sequence[str]:
        """Prefixes of the submodels that have their own `hf_to_vllm_mapper`."""
        if isinstance(self._model, type):
            return []
        parts = ((name, getattr(part, "hf_to_vllm_mapper", None)) for name, part in self._model.named_modules())
        return [f"{name}." for name, mapper in parts if name and mapper is not None]

    def written_through(self, name: str, place: str | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        ends = name.rpartition(".")[2], (place or self.renamed(name)).rpartition(".")[2]
        return FUNCTIONS.get(ends)

    def expert_layout(self, name: str) -> str:
        modules = {base_name(f"{path}.weight"): module for path, module in self._model.named_modules()}
        method = getattr(modules.get(f"{name.rpartition('.')[0]}.weight"), "quant_method", None)
        kernel = getattr(getattr(method, "unquantized_backend", None), "name", AS_SAVED[0])
        return "" if kernel in AS_SAVED else str(kernel)

    def merged_outputs(self, name: str) -> Sequence[int]:
        layers = {base_name(f"{path}.weight"): module for path, module in self._model.named_modules()}
        return tuple(getattr(layers.get(f"{name.rpartition('.')[0]}.weight"), "output_sizes", ()))

    def is_added_by_first_rank(self, bias: torch.Tensor) -> bool:
        return any(
            own.data_ptr() == bias.data_ptr()
            and any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__)
            for module in self._model.modules()
            if isinstance(own := getattr(module, "bias", None), torch.Tensor)
        )

    def lora_layers(self) -> dict[str, VLLMLoRALayer]:
        layers = getattr(getattr(self._model, "lora_manager", None), "modules", {})
        return {name: VLLMLoRALayer(layer) for name, layer in layers.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class VLLMLoRALayer:
    """vLLM's layer with LoRA. Each call reads its tensors anew, so that replaced ones are noticed."""

    layer: Any

    def stacks(self, kind: str) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = getattr(self.layer, f"{kind.lower()}_stacked")
        return found


def _mapper_of(model: Any) -> Any:
    return getattr(model, "hf_to_vllm_mapper", None)


def _renamed(model: Any, name: str) -> str:
    mapper = _mapper_of(model)
    if mapper is None:
        return name
    if getattr(mapper, "orig_to_new_stacked", None):  # newer mappers also fuse, and lose the name of the part
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    found = mapper.apply_list([name])
    return found[0] if found else name


def _stacked(model: Any) -> dict[str, Sequence[str]]:
    """Return the fusions of a class that lists them only in its checkpoint mapper: StableLM, GPT-J."""
    found: dict[str, list[str]] = {}
    for part, (fused, _) in (getattr(_mapper_of(model), "orig_to_new_stacked", None) or {}).items():
        names = part.strip("."), fused.strip(".")
        if not any("." in name for name in names):
            found.setdefault(names[1], []).append(names[0])
    return {fused: names for fused, names in found.items() if len(names) > 1}
