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
    """A vLLM model's tensors by name, and the translation of a checkpoint's names into the engine's.

    The model's class is enough for `fusions` and `renamed`.
    """

    def __init__(self, model: torch.nn.Module | type) -> None:
        self._model: Any = model

    @functools.cached_property
    def fusions(self) -> Mapping[str, Sequence[str]]:
        """Parts of each fused layer: ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``."""
        found: dict[str, Sequence[str]] = {}
        parts = [self._model] if isinstance(self._model, type) else self._model.modules()
        for part in parts:  # a multimodal class may leave fusions to its language model
            found = {**(getattr(part, "packed_modules_mapping", None) or _stacked(part)), **found}
        return found

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Return all parameters, each once, by their names in a model without adapters."""
        named = ((base_name(name), parameter) for name, parameter in self._model.named_parameters())
        return {name: parameter for name, parameter in named if name is not None}

    def renamed(self, name: str) -> str:
        """Translate a checkpoint's name of a tensor into the engine's, before fusions."""
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
        """Return the function that maps a checkpoint's tensor to the engine's; None: the two are equal.

        ``place`` is the engine's name of the tensor, if `renamed` doesn't know it.
        """
        ends = name.rpartition(".")[2], (place or self.renamed(name)).rpartition(".")[2]
        return FUNCTIONS.get(ends)

    def _layer(self, name: str) -> Any:
        """Return the layer of a tensor."""
        layers = {base_name(f"{path}.weight"): module for path, module in self._model.named_modules()}
        return layers.get(f"{name.rpartition('.')[0]}.weight")

    def expert_layout(self, name: str) -> str:
        """Return the layout of an experts' tensor: "" as in a checkpoint, else the kernel that defines it."""
        method = getattr(self._layer(name), "quant_method", None)
        kernel = getattr(getattr(method, "unquantized_backend", None), "name", AS_SAVED[0])
        return "" if kernel in AS_SAVED else str(kernel)

    def merged_outputs(self, name: str) -> Sequence[int]:
        """Return the output sizes of a tensor's layer, one per part. Ranks split each part. Empty: one part."""
        return tuple(getattr(self._layer(name), "output_sizes", ()))

    def is_added_by_first_rank(self, bias: torch.Tensor) -> bool:
        """Return whether only the first rank adds a bias, because ranks sum the layer's outputs."""
        return any(
            own.data_ptr() == bias.data_ptr()
            and any(kind.__name__ == "RowParallelLinear" for kind in type(module).__mro__)
            for module in self._model.modules()
            if isinstance(own := getattr(module, "bias", None), torch.Tensor)
        )

    def lora_layers(self) -> dict[str, LoRALayer]:
        """Return the layers with slots for adapters, by name."""
        layers = getattr(getattr(self._model, "lora_manager", None), "modules", {})
        return {name: LoRALayer(layer) for name, layer in layers.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class LoRALayer:
    """A layer of the engine with slots for adapters. Each call reads its tensors anew, so replaced ones are noticed."""

    layer: Any

    def stacks(self, kind: str) -> Sequence[torch.Tensor]:
        """Return the tensors of ``lora_A`` or ``lora_B``, one per fused part: [slots, 1, rows, columns]."""
        stacks: Sequence[torch.Tensor] = getattr(self.layer, f"{kind.lower()}_stacked")
        return stacks


def _renamed(model: Any, name: str) -> str:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if getattr(mapper, "orig_to_new_stacked", None):  # newer mappers also fuse, and lose the name of the part
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    return next(iter(mapper.apply_list([name])), name)


def _stacked(model: Any) -> dict[str, Sequence[str]]:
    """Return the fusions of a class that lists them only in its checkpoint mapper: StableLM, GPT-J."""
    fusions: dict[str, list[str]] = {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for part, (fused, _) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
        part, fused = part.strip("."), fused.strip(".")
        if "." not in part + fused:
            fusions.setdefault(fused, []).append(part)
    return {fused: names for fused, names in fusions.items() if len(names) > 1}
