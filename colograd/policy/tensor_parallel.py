"""A policy cut as the engine's ranks cut it: each has its heads, its columns of an MLP, its entries of the vocabulary.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): what goes into an attention or an MLP is the same on all ranks
of an engine, each computes with its part, and what comes out is summed. So the gradient of the input is a sum, too.
Layers keep their classes' own forwards: hooks before them and classes derived from theirs put the sums around them.
Plain tensors alone are used, so that a parameter can be the very tensor of vLLM's rank.

What a rank has whole has the same gradient on all ranks, but for what only sees the rank's own heads or columns: norms
of queries and keys, key-value heads of which several ranks have the same, the first matrix of an adapter on a layer
that is cut by outputs. Theirs are summed as they are made.

An adapter (LoRA) is cut as its layer: by outputs its second matrix, by inputs its first, whose few products are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.layout import RankLayout
from ..parallel.shards import RankGroup, Shard, group_of
from ..runtime import cpu_products
from .exchanges import enter, leave
from .lora import AdaptedLayer, unwrap


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The entries ``start`` ... ``stop`` of a vocabulary of ``size``, which a rank has."""

    start: int
    stop: int
    size: int
    group: RankGroup


def _enter_region(group: RankGroup, region: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Before an attention, a convolution or an MLP whose first linear layers are cut by outputs, and the last one by
    inputs. (A hook, as the rows of a layer with a state are run by a forward of its own: `recurrent`.)"""

    def entered(value: Any) -> Any:
        return enter(value, group) if isinstance(value, torch.Tensor) else value

    return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}


def _leave_product(group: RankGroup, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """After an adapter's first matrix that is cut by inputs."""
    return leave(output, group)


class _Experts(nn.Module):
    """All experts of a mixture, cut between their two products. The router, which is whole, gets whole gradients: its
    weights of the experts enter with the tokens."""

    cut_group: RankGroup

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _enter_region(self.cut_group, self, args, kwargs)
        return leave(super().forward(*args, **kwargs), self.cut_group)


class _RowParallel(nn.Linear):
    """Cut by inputs; its bias is added once."""

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
    """Called by itself it gives all logits; `logprobs` computes with this rank's alone."""

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
    """How a policy is cut, in the attribute ``tensor_parts`` of the model. A copy of the model has the same."""

    layout: RankLayout
    engine: RankGroup  # the ranks that have the policy together
    data: RankGroup  # the ranks with the same part, among which gradients are summed
    places: tuple[Mapping[str, Shard], ...]  # of each of the engine's ranks, by a parameter's name

    def __deepcopy__(self, memo: Any) -> TensorParts:
        return self

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's."""
        return self.places[self.engine.place]

    def holders(self, name: str, place: int | None = None) -> tuple[int, ...]:
        """The places in the engine of those that have the same part of a parameter as this rank (or another) has."""
        own = self.places[self.engine.place if place is None else place][name]
        return tuple(place for place, shards in enumerate(self.places) if shards[name] == own)

    def is_counted(self, name: str) -> bool:
        """Whether this rank's part counts in sums over the engine's ranks: of equal ones, one does."""
        return self.holders(name)[0] == self.engine.place

    @property
    def elements(self) -> int:
        """Of the whole policy."""
        return sum(torch.Size(shard.shape).numel() for shard in self.shards.values())


def parts_of(model: Any) -> TensorParts | None:
    """How the model is cut; None: each rank has all of it."""
    found: TensorParts | None = getattr(model, "tensor_parts", None)
    return found


def trained_elements(model: Any) -> int:
    """What a run trains, on all ranks of an engine together."""
    parts, trained = parts_of(model), [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return sum(p.numel() if parts is None else torch.Size(parts.shards[name].shape).numel() for name, p in trained)


def vocabulary_size(model: Any) -> int:
    """Entries of the input embedding, of all ranks together where they share them out."""
    table = model.get_input_embeddings()
    own: VocabularyPart | None = getattr(table, "vocabulary", None)
    return int(table.weight.shape[0]) if own is None else own.size


def split(model: Any, shards: Mapping[str, Shard], layout: RankLayout) -> TensorParts:
    """Make a model whose parameters are parts already compute as the whole one does. A collective.

    Args:
        shards: of each parameter, by its name.

    Raises:
        RuntimeError: vLLM cuts a layer in a way that isn't known.
    """
    engine = group_of(layout, lambda rank: rank.engine_group, meets=True)
    data = group_of(layout, lambda rank: rank.shard_group)
    parts = TensorParts(layout, engine, data, engine.gather(dict(shards)))
    regions: dict[str, Any] = {}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in list(model.named_modules()):
        own = {name: shards[f"{path}.{name}"] for name, _ in module.named_parameters(recurse=False)
               if f"{path}.{name}" in shards}  # fmt: skip
        if module is head or module is table:
            shard = own.get("weight") or shards[_name_of(model, module.weight)]
            _cut_vocabulary(module, shard, engine, module is head)
        elif all(shard.is_whole for shard in own.values()):
            continue
        elif ".lora_A." in path:  # by inputs; its forward may be its own: `lora_inputs`
            module.in_features = module.weight.shape[1]
            module.register_forward_hook(functools.partial(_leave_product, engine))
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
    """Of an adapted layer's base, or of a matrix of its adapter, the layer; of any other module its own path."""
    return path.partition(".lora_")[0].removesuffix(".base_layer")


def adapter_shards(adapted: Iterable[AdaptedLayer], shards: Mapping[str, Shard]) -> dict[int, Shard]:
    """The parts of an adapter's matrices, by their `id`, on a base of which a rank has the parts ``shards`` (by the
    names of a model without adapters)."""
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


def _name_of(model: nn.Module, parameter: torch.Tensor) -> str:
    return next(name for name, own in model.named_parameters() if own is parameter)


def _cut_vocabulary(module: Any, shard: Shard, group: RankGroup, is_head: bool) -> None:
    start, stop = shard.boxes[0][0]
    part = VocabularyPart(start, stop, shard.shape[0], group)
    _become(module, _Head if is_head else _Embedding, vocabulary=part)
    if not is_head and module.padding_idx is not None:  # whose row gets no gradient
        inside = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if inside else None


def _sum_partial_gradients(model: nn.Module, regions: Mapping[str, nn.Module], parts: TensorParts) -> None:
    """Of parameters inside of attentions and MLPs that several ranks have alike, each with its own heads' gradient."""
    partial = {
        name: parts.holders(name)
        for path, region in regions.items()
        for name, parameter in ((f"{path}.{own}", p) for own, p in region.named_parameters())
        if parameter.requires_grad and not _after_the_sum(model, name, parts.shards)
    }
    among: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
    for name, holders in partial.items():
        # Every rank makes the same groups in the same order, also for a parameter that it shares with nobody.
        sets = tuple(parts.holders(name, place) for place in range(parts.engine.size))
        if all(len(one) == 1 for one in sets):
            continue
        if len(holders) == parts.engine.size:
            group = parts.engine
        else:
            if sets not in among:
                among[sets] = group_of(parts.layout, functools.partial(_same_heads, sets=sets))
            group = among[sets]
        parameter = model.get_parameter(name)
        parameter.register_hook(functools.partial(_summed, group=group))


def _same_heads(rank: RankLayout, sets: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(rank.engine_group[place] for place in sets[rank.engine_place])


def _summed(gradient: torch.Tensor, group: RankGroup) -> torch.Tensor:
    return group.sum_(gradient.to(torch.float32, copy=True).contiguous()).to(gradient.dtype)


def _after_the_sum(model: nn.Module, name: str, shards: Mapping[str, Shard]) -> bool:
    """Whether it is used on what the ranks have summed already, so that its gradient is whole."""
    path, _, last = name.rpartition(".")
    if ".lora_B." in name:
        return not shards[name.replace(".lora_B.", ".lora_A.")].is_whole
    return last == "bias" and isinstance(model.get_submodule(path), _RowParallel)


def check_split(model: Any) -> None:
    """Raise a ValueError if it is a model of a trainer that has cut it."""
    if parts_of(model) is not None:
        raise ValueError("The model was cut by an earlier trainer (sharding: tensor): load it again.")
