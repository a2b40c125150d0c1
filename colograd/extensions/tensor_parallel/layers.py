"""A policy cut like the engine: each rank has some heads, some columns of the MLPs, some entries of the vocabulary.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): all ranks of an engine have the same inputs of an attention or
an MLP. Each rank computes with its part, and the outputs are summed. So the gradient of the input is a sum, too.
Layers keep their classes' own forwards. Hooks before them and derived classes add the sums.
Only plain tensors are used, so that a parameter can be the very tensor of vLLM's rank.

A parameter that is whole on each rank has the same gradient on all ranks, with one exception: parameters that only see
the rank's own heads or columns. These are norms of queries and keys, shared key-value heads, and an adapter's first
matrix on a layer cut by outputs. Their gradients are summed as soon as they are computed.

An adapter (LoRA) is cut like its layer. If the layer is cut by outputs, the second matrix is cut. If the layer is cut
by inputs, the first matrix is cut, and its few products are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.layout import RankLayout
from ...parallel.shards import RankGroup, Shard, group_of
from ...policy.exchanges import enter, leave
from ...policy.lora import AdaptedLayer, unwrap
from ...runtime import cpu_products


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Entries ``start`` ... ``stop`` of a vocabulary of ``size`` entries: one rank's part."""

    start: int
    stop: int
    size: int
    group: RankGroup

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return enter(hidden, self.group)

    def combine(
        self, maximum: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Combine the ranks' maxima and sums (see `HeadPart`) into the whole vocabulary's."""
        label_logit, moment, total = sums
        largest = self.group.max_(maximum.clone())
        fall = maximum - largest
        decay = fall.exp()
        shared = torch.stack([label_logit, decay * (moment + fall * total), decay * total])
        label_logit, moment, total = self.group.sum_(shared).unbind()
        return largest, (label_logit, moment, total)


def _enter_region(group: RankGroup, region: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Mark the inputs of an attention, a convolution or an MLP: gradients of the ranks are summed there.

    The first linear layers of such a region are cut by outputs, the last one by inputs. (This is a hook, because layers
    with a state have a forward of their own: `recurrent`.)
    """

    def entered(value: Any) -> Any:
        return enter(value, group) if isinstance(value, torch.Tensor) else value

    return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}


class _Experts(nn.Module):
    """Experts of a mixture, all cut between their two products.

    The whole router gets whole gradients, because its expert weights are inputs of the region like the tokens.
    """

    cut_group: RankGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _enter_region(self.cut_group, self, args, kwargs)
        return leave(super().forward(*args, **kwargs), self.cut_group)


class _RowParallel(nn.Linear):
    """Linear layer cut by inputs; the bias is added once."""

    cut_group: RankGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        summed = leave(F.linear(input, self.weight), self.cut_group)
        return summed if self.bias is None else summed + self.bias


class _Embedding(nn.Embedding):
    vocabulary: VocabularyPart

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.vocabulary
        absent = (input < own.start) | (input >= own.stop)
        found = super().forward((input - own.start).masked_fill(absent, 0))
        return leave(found.masked_fill(absent[..., None], 0.0), own.group)


class _Head(nn.Linear):
    """Head cut by the vocabulary. Its forward returns all logits; `logprobs` only computes this rank's."""

    vocabulary: VocabularyPart

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.vocabulary
        logits = F.linear(enter(input, own.group), self.weight, self.bias)
        return leave(F.pad(logits, (own.start, own.size - own.stop)), own.group)


@functools.cache
def _derived(kind: Any, own: Any) -> Any:
    return type(own.__name__, (kind, own), {"__module__": own.__module__})


def _become(module: Any, kind: Any, **attributes: Any) -> None:
    own: Any = type(module)
    cpu_products.give_back(module)
    module.__class__ = _derived(kind, own)
    for name, value in attributes.items():
        setattr(module, name, value)


@dataclass(frozen=True, eq=False)
class TensorParts:
    """Parts of a policy on each rank, in the model's attribute ``tensor_parts``. A model's copy shares this object."""

    layout: RankLayout
    engine: RankGroup  # ranks that have the policy together
    data: RankGroup  # ranks with the same part, for sums of gradients
    places: tuple[Mapping[str, Shard], ...]  # parts of each of the engine's ranks, by parameter name

    def __deepcopy__(self, memo: Any) -> TensorParts:
        return self

    @property
    def shards(self) -> Mapping[str, Shard]:
        return self.places[self.engine.place]

    def holders(self, name: str, place: int | None = None) -> tuple[int, ...]:
        """Return the places in the engine of the ranks that share this rank's (or another's) part of a parameter."""
        own = self.places[self.engine.place if place is None else place][name]
        return tuple(place for place, shards in enumerate(self.places) if shards[name] == own)

    @property
    def elements(self) -> int:
        """Number of elements of the whole policy."""
        return sum(torch.Size(shard.shape).numel() for shard in self.shards.values())


def split(model: Any, shards: Mapping[str, Shard], layout: RankLayout) -> TensorParts:
    """Make a model with cut parameters compute like the whole model. A collective. ``shards``: this rank's part of each
    parameter, by name."""
    engine = group_of(layout, lambda rank: rank.engine_group, meets=True)
    data = group_of(layout, lambda rank: rank.shard_group)
    parts = TensorParts(layout, engine, data, engine.gather(dict(shards)))
    regions: dict[str, Any] = {}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in list(model.named_modules()):
        own = {name: shards[f"{path}.{name}"] for name, _ in module.named_parameters(recurse=False)
               if f"{path}.{name}" in shards}  # fmt: skip
        if module is head or module is table:
            name = next(name for name, parameter in model.named_parameters() if parameter is module.weight)
            start, stop = shards[name].boxes[0][0]
            part = VocabularyPart(start, stop, shards[name].shape[0], engine)
            _become(module, _Head if module is head else _Embedding, vocabulary=part)
            padding = getattr(module, "padding_idx", None)
            if padding is not None:  # the padding token's row gets no gradient
                module.padding_idx = padding - start if start <= padding < stop else None
        elif all(shard.is_whole for shard in own.values()):
            continue
        elif ".lora_A." in path:  # cut by inputs; a hook, because `lora` may have replaced its forward
            module.in_features = module.weight.shape[1]
            module.register_forward_hook(lambda layer, args, output: leave(output, engine))
        elif isinstance(module, nn.Linear) and own["weight"].local_shape[0] == own["weight"].shape[0]:
            _become(module, _RowParallel, cut_group=engine, in_features=module.weight.shape[1])
        elif isinstance(module, nn.Linear):
            module.out_features = module.weight.shape[0]
            parent = _layer_of(path).rpartition(".")[0]
            regions[parent] = model.get_submodule(parent)
        elif isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels:
            module.groups = module.in_channels = module.out_channels = module.weight.shape[0]
        elif path.endswith(".experts"):
            _become(module, _Experts, cut_group=engine)
        else:
            raise RuntimeError(f"The engine's ranks cut {path} ({type(module).__name__}), which isn't known yet.")
    for region in regions.values():
        region.register_forward_pre_hook(functools.partial(_enter_region, engine), with_kwargs=True)
        if hasattr(region, "num_key_value_groups"):
            region.num_key_value_groups = region.q_proj.weight.shape[0] // region.k_proj.weight.shape[0]
    _sum_partial_gradients(model, regions, parts)
    unwrap(model).tensor_parts = parts
    return parts


def _layer_of(path: str) -> str:
    """Return the adapted layer's path for its base or a matrix of its adapter; other paths unchanged."""
    return path.partition(".lora_")[0].removesuffix(".base_layer")


def adapter_shards(adapted: Iterable[AdaptedLayer], shards: Mapping[str, Shard]) -> dict[int, Shard]:
    """Return this rank's parts of the adapter's A and B matrices, by the `id` of the parameter.

    ``shards``: this rank's parts of the base's parameters, by their names in a model without adapters.
    """
    found: dict[int, Shard] = {}
    for layer in adapted:
        base, rank = shards[layer.parameter], len(layer.lora_a)
        outputs, inputs = base.shape
        by_inputs = base.local_shape[0] == outputs
        columns = [(slice(None), slice(*box[1])) for box in base.boxes] if by_inputs else [()]
        rows = [()] if by_inputs else [(slice(*box[0]),) for box in base.boxes]
        found[id(layer.lora_a)] = Shard.of_cuts((rank, inputs), columns)
        found[id(layer.lora_b)] = Shard.of_cuts((outputs, rank), rows)
    return found


def _sum_partial_gradients(model: nn.Module, regions: Mapping[str, nn.Module], parts: TensorParts) -> None:
    """Sum the gradients of parameters inside attentions and MLPs that several ranks share.

    Each rank's gradient is only of its own heads or columns.
    """
    among: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
    inside = ((f"{path}.{own}", p) for path, region in regions.items() for own, p in region.named_parameters())
    partial = {name: parameter for name, parameter in inside if parameter.requires_grad}
    for name, parameter in partial.items():
        module, _, last = name.rpartition(".")
        if ".lora_B." in name:
            is_whole = not parts.shards[name.replace(".lora_B.", ".lora_A.")].is_whole
        else:
            is_whole = last == "bias" and isinstance(model.get_submodule(module), _RowParallel)
        if is_whole:  # the parameter is applied to the ranks' sum
            continue
        # Every rank makes the same groups in the same order, also for a parameter that it shares with nobody.
        sets = tuple(parts.holders(name, place) for place in range(parts.engine.size))
        if all(len(one) == 1 for one in sets):
            continue
        if len(sets[parts.engine.place]) == parts.engine.size:
            group = parts.engine
        else:

            def sharing(rank: RankLayout, sets: Sequence[tuple[int, ...]] = sets) -> tuple[int, ...]:
                return tuple(rank.engine_group[at] for at in sets[rank.engine_place])

            if sets not in among:
                among[sets] = group_of(parts.layout, sharing)
            group = among[sets]
        parameter.register_hook(functools.partial(_summed, group=group))


def _summed(gradient: torch.Tensor, group: RankGroup) -> torch.Tensor:
    return group.sum_(gradient.to(torch.float32, copy=True).contiguous()).to(gradient.dtype)
