"""Tensor-parallel layers of a policy: a rank has the same heads, MLP columns and vocabulary entries as in vLLM.

As in Megatron-LM (arXiv 1909.08053), each rank computes with its part of the weights. The ranks' outputs are summed,
and so are the gradients of the inputs. Hooks and subclasses add these sums to the forwards of transformers' layers.
Parameters are plain tensors, not DTensors, so that a parameter can share a vLLM tensor's memory. A LoRA adapter is
divided like its layer.
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
from ...policy.lora import AdaptedLayer, unwrap
from ...policy.sending import enter, leave
from ...runtime import cpu_products


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """One rank's part of a vocabulary of ``size`` entries: ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int
    size: int
    group: RankGroup

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return enter(hidden, self.group)

    def combine(
        self, maximum: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Combine the ranks' statistics of their vocabulary shards into the statistics of the whole vocabulary. For
        each label (target token), ``maximum`` is the largest logit m in the shard. ``sums`` are the label's own logit
        (0 if another shard has it), and the sums over the shard's logits x of (x - m) * exp(x - m) and exp(x - m)."""
        label_logit, moment, total = sums
        largest = self.group.max_(maximum.clone())
        fall = maximum - largest
        decay = fall.exp()
        shared = torch.stack([label_logit, decay * (moment + fall * total), decay * total])
        label_logit, moment, total = self.group.sum_(shared).unbind()
        return largest, (label_logit, moment, total)


def _enter_region(group: RankGroup, region: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Sum over ranks, in the backward, the loss's gradients with respect to a module's inputs. Pre-forward hook of
    attention, convolutions, MLPs and experts. Routing weights are experts' inputs, so a router gets whole gradients."""

    def entered(value: Any) -> Any:
        return enter(value, group) if isinstance(value, torch.Tensor) else value

    return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}


class _RowParallel(nn.Linear):
    """Linear layer with some of the weight's columns on each rank. The bias is added to the sum over the ranks."""

    cut_group: RankGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        summed = leave(F.linear(input, self.weight), self.cut_group)
        return summed if self.bias is None else summed + self.bias


class _Embedding(nn.Embedding):
    vocabulary: VocabularyPart

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.vocabulary
        absent = (input < own.start) | (input >= own.stop)
        embedded = super().forward((input - own.start).masked_fill(absent, 0))
        return leave(embedded.masked_fill(absent[..., None], 0.0), own.group)


class _Head(nn.Linear):
    """Language-model head with some vocabulary rows on each rank. The forward returns the logits of all rows. Training
    doesn't call the forward: `label_logprobs` computes this rank's logits only."""

    vocabulary: VocabularyPart

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.vocabulary
        logits = F.linear(enter(input, own.group), self.weight, self.bias)
        return leave(F.pad(logits, (own.start, own.size - own.stop)), own.group)


def _become(module: Any, kind: Any, **attributes: Any) -> None:
    own: Any = type(module)
    cpu_products.give_back(module)
    module.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})
    for name, value in attributes.items():
        setattr(module, name, value)


@dataclass(frozen=True, eq=False)
class TensorParts:
    """The policy's attribute ``tensor_parts``: which part of each parameter each rank has."""

    layout: RankLayout
    engine: RankGroup  # Ranks of one engine, which together have the whole policy.
    data: RankGroup  # Ranks with this rank's part, one per engine.
    places: tuple[Mapping[str, Shard], ...]  # For each rank of the engine: the rank's part of each parameter, by name.

    @property
    def shards(self) -> Mapping[str, Shard]:
        return self.places[self.engine.place]

    def holders(self, name: str, place: int | None = None) -> tuple[int, ...]:
        """Return which ranks of the engine have the same part of a parameter as rank ``place`` (default: this rank).
        Ranks are numbered from 0 in each engine."""
        own = self.places[self.engine.place if place is None else place][name]
        return tuple(place for place, shards in enumerate(self.places) if shards[name] == own)

    @property
    def elements(self) -> int:
        return sum(torch.Size(shard.shape).numel() for shard in self.shards.values())


def split(model: Any, shards: Mapping[str, Shard], layout: RankLayout) -> TensorParts:
    """Make ``model`` compute like the whole model, though its parameters are only this rank's ``shards`` of the whole
    parameters. A collective."""
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
            if padding is not None:  # The padding token's embedding gets no gradient.
                module.padding_idx = padding - start if start <= padding < stop else None
        elif all(shard.is_whole for shard in own.values()):
            continue
        elif ".lora_A." in path:  # Matrix A of an adapter, cut by inputs.
            # A hook sums the outputs, because the extension `lora` may replace A's forward.
            module.in_features = module.weight.shape[1]
            module.register_forward_hook(lambda layer, args, output: leave(output, engine))
        elif isinstance(module, nn.Linear) and own["weight"].local_shape[0] == own["weight"].shape[0]:
            _become(module, _RowParallel, cut_group=engine, in_features=module.weight.shape[1])
        elif isinstance(module, nn.Linear):
            module.out_features = module.weight.shape[0]
            # The attention or MLP around the layer. For a base layer or LoRA matrix: the one around its adapted layer.
            parent = path.partition(".lora_")[0].removesuffix(".base_layer").rpartition(".")[0]
            regions[parent] = model.get_submodule(parent)
        elif isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels:
            module.groups = module.in_channels = module.out_channels = module.weight.shape[0]
        elif path.endswith(".experts"):
            regions[path] = module  # each rank has some intermediate features of every expert
            module.register_forward_hook(lambda layer, args, output: leave(output, engine))
        else:
            raise RuntimeError(f"`sharding: tensor` can't divide {path} ({type(module).__name__}): set sharding: fsdp.")
    for region in regions.values():
        region.register_forward_pre_hook(functools.partial(_enter_region, engine), with_kwargs=True)
        if hasattr(region, "num_key_value_groups"):
            region.num_key_value_groups = region.q_proj.weight.shape[0] // region.k_proj.weight.shape[0]
    _sum_partial_gradients(model, regions, parts)
    unwrap(model).tensor_parts = parts
    return parts


def adapter_shards(adapted: Iterable[AdaptedLayer], shards: Mapping[str, Shard]) -> dict[int, Shard]:
    """Return {`id` of a LoRA matrix: this rank's part of the matrix}. ``shards`` maps a base parameter's name, as in a
    model without adapters, to this rank's part of the parameter."""
    of_adapter: dict[int, Shard] = {}
    for layer in adapted:
        base, rank = shards[layer.parameter], len(layer.lora_a)
        outputs, inputs = base.shape
        by_inputs = base.local_shape[0] == outputs
        columns = [(slice(None), slice(*box[1])) for box in base.boxes] if by_inputs else [()]
        rows = [()] if by_inputs else [(slice(*box[0]),) for box in base.boxes]
        of_adapter[id(layer.lora_a)] = Shard.of_cuts((rank, inputs), columns)
        of_adapter[id(layer.lora_b)] = Shard.of_cuts((outputs, rank), rows)
    return of_adapter


def _sum_partial_gradients(model: nn.Module, regions: Mapping[str, nn.Module], parts: TensorParts) -> None:
    """Register hooks that sum a parameter's gradient over the ranks that have the same part, e.g. a whole query norm.
    Each of these ranks computes only the contribution of its own heads or columns to the gradient."""
    among: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
    inside = ((f"{path}.{own}", p) for path, region in regions.items() for own, p in region.named_parameters())
    partial = {name: parameter for name, parameter in inside if parameter.requires_grad}
    for name, parameter in partial.items():
        module, _, last = name.rpartition(".")
        if ".lora_B." in name:
            is_whole = not parts.shards[name.replace(".lora_B.", ".lora_A.")].is_whole
        else:
            is_whole = last == "bias" and isinstance(model.get_submodule(module), _RowParallel)
        if is_whole:  # It is applied to the ranks' summed output, so each rank has the whole gradient.
            continue
        # Making a group is a collective: every rank makes all groups in this order, also groups without the rank.
        sets = tuple(parts.holders(name, place) for place in range(parts.engine.size))
        if all(len(one) == 1 for one in sets):
            continue
        if sets not in among:
            own = functools.partial(_sharing, sets)
            among[sets] = parts.engine if len(sets[0]) == len(sets) else group_of(parts.layout, own)
        parameter.register_hook(functools.partial(_summed, group=among[sets]))


def _sharing(sets: Sequence[tuple[int, ...]], rank: RankLayout) -> tuple[int, ...]:
    return tuple(rank.engine_group[place] for place in sets[rank.engine_place])


def _summed(gradient: torch.Tensor, group: RankGroup) -> torch.Tensor:
    return group.sum_(gradient.to(torch.float32, copy=True).contiguous()).to(gradient.dtype)
