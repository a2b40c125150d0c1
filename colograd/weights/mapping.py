"""Which slice of which engine tensor holds which policy parameter.

vLLM fuses projections (q, k and v become rows of one matrix) and pads vocabularies. The model class names its fusions
in ``packed_modules_mapping`` and its renamings in ``hf_to_vllm_mapper``; shapes decide the rest.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..policy.lora import base_name


@dataclass(frozen=True, slots=True)
class Slice:
    """A policy parameter and its place in the engine: ``destination`` is a view of the engine's own storage."""

    name: str  # the policy's name of the parameter
    source: torch.Tensor
    destination: torch.Tensor

    def equal(self) -> bool:
        """Whether the engine holds the policy's value, cast to its dtype, bit for bit."""
        return torch.equal(self.destination, self.source.detach().to(self.destination))


class UnmappedParameter(ValueError):
    """A parameter of the policy has no place in the engine, or a tensor of the engine no source in the policy."""


def map_parameters(policy: torch.nn.Module, engine_model: torch.nn.Module) -> list[Slice]:
    """Pair every parameter of the policy with its slice of the engine's tensors.

    Of a LoRA policy, the parameters of its base: an adapter's tensors have no place among the engine's weights.

    Raises:
        UnmappedParameter: naming what is left over on either side.
    """
    targets, sources = _base_parameters(engine_model), _base_parameters(policy)
    own_names = {base_name(name): name for name, _ in policy.named_parameters()}
    slices, missing = [], []
    for name, source in sources.items():
        destination = _destination(name, source, sources, targets, engine_model)
        if destination is None:
            missing.append(f"{name} {tuple(source.shape)}")
        else:
            slices.append(Slice(own_names[name], source, destination))
    if missing:
        raise UnmappedParameter(f"The engine has no place for {len(missing)} parameters: {', '.join(missing[:4])}.")
    bare = sorted(_uncovered(slices, targets))
    if bare:
        raise UnmappedParameter(f"The policy has no source for {len(bare)} engine tensors: {', '.join(bare[:4])}.")
    return slices


def _base_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by the names they have in a model without adapters."""
    return {base: p for name, p in model.named_parameters() if (base := base_name(name)) is not None}


def _destination(
    name: str,
    source: torch.Tensor,
    sources: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    engine_model: torch.nn.Module,
) -> torch.Tensor | None:
    """The rows of one of the engine's tensors (``targets``) that hold ``source``; None: there are none."""
    mapped = renamed(name, engine_model)
    if mapped in targets:
        return _rows(targets[mapped], 0, source)
    for fused, parts in fusions(engine_model).items():
        for index, part in enumerate(parts):
            target = targets.get(mapped.replace(f".{part}.", f".{fused}."))
            if target is not None:
                siblings = [name.replace(f".{part}.", f".{earlier}.") for earlier in parts[:index]]
                if not sources.keys() >= {*siblings}:
                    return None
                return _rows(target, sum(sources[sibling].shape[0] for sibling in siblings), source)
    return None


def fusions(engine_model: torch.nn.Module) -> dict[str, list[str]]:
    """The parts of each fused layer by its name: ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``."""
    return getattr(engine_model, "packed_modules_mapping", None) or {}


def renamed(name: str, engine_model: torch.nn.Module) -> str:
    """The name after the model's renamings, but before its fusions (newer mappers do both, and drop the place)."""
    mapper = getattr(engine_model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    if getattr(mapper, "orig_to_new_stacked", None):
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    found = mapper.apply_list([name])
    return found[0] if found else name


def _rows(target: torch.Tensor, offset: int, source: torch.Tensor) -> torch.Tensor | None:
    """Rows offset ... offset+len(source) of ``target``; None where the shapes don't fit."""
    if target.dim() != source.dim() or target.shape[1:] != source.shape[1:]:
        return None
    if source.dim() == 0:
        return target.detach()
    if offset + source.shape[0] > target.shape[0]:
        return None
    return target.detach()[offset : offset + source.shape[0]]


def _uncovered(slices: list[Slice], targets: dict[str, torch.Tensor]) -> Iterator[str]:
    """Engine tensors that the slices don't fill. A padded vocabulary's last rows are nobody's."""
    filled: dict[int, int] = defaultdict(int)
    for part in slices:
        filled[part.destination.untyped_storage().data_ptr()] += part.destination.numel()
    for name, target in targets.items():
        covered = filled[target.untyped_storage().data_ptr()]
        if (covered < target.numel() and not ("embed" in name or "lm_head" in name or "wte" in name)) or covered == 0:
            yield name
