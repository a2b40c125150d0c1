"""Weight sync of a tensor-parallel policy: parameters outside adapters share memory with this rank's engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...parallel.ranks import on_all_ranks
from ...parallel.shards import Shard
from ...policy.lora import Adapter, adapted_layers, base_name
from ...runtime.registry import hooks
from ...weights import WeightSync, proof
from ...weights.mapping import Slice
from ...weights.selection import Pairing, move
from ...weights.sync import SharedWeights, Unserved, obstacle
from .layers import adapter_shards, split

if TYPE_CHECKING:
    pass


def weights_in_parts(pairing: Pairing, adapter: Adapter | None) -> WeightSync:
    """Make the parameters of a whole policy share memory with this rank's engine, and return the weight sync. First,
    while the policy is whole, the map to engine tensors is checked. An adapter is cut like its base layers, because
    vLLM's LoRA slots are cut in this way, and shares no memory."""
    policy, engine = pairing.policy, pairing.engine
    with on_all_ranks("the plan of the policy's parts"):
        parts = _parts(pairing.slices)
    proof.check_read(pairing.slices, policy, engine, tower_prompt=pairing.tower_prompt)
    with torch.no_grad():  # Copy this rank's parts into the engine. This frees the whole parameters.
        for part, own in parts:
            part.destination.copy_(own.of(part.source.detach()))
            part.source.data = part.destination
    shards, lora_shards = {part.name: shard for part, shard in parts}, dict[int, Shard]()
    if adapter is not None:
        lora_shards = adapter_shards(adapted_layers(policy), {str(base_name(name)): s for name, s in shards.items()})
        for name, parameter in policy.named_parameters():
            if (shard := lora_shards.get(id(parameter))) is not None:
                parameter.data, shards[name] = shard.of(parameter.detach()).clone(), shard
    move(policy, pairing.device)  # The base is in place, so only the adapter and buffers move.
    split(policy, shards, engine.layout)
    sync: WeightSync = (base := SharedWeights(policy, engine, [part for part, _ in parts]))
    if adapter is not None:
        try:
            (map_adapter,), (adapter_weights,) = hooks("map_adapter"), hooks("adapter_weights")
            sync = adapter_weights(policy, engine, map_adapter(policy, engine, lora_shards), base)
        except Unserved as unserved:
            raise ValueError(f"sharding is 'tensor', but {unserved}: set sharding: gradients.") from None
    if not pairing.equal:
        proof.check_same(policy, engine)
    return sync


def _parts(slices: Sequence[Slice]) -> list[tuple[Slice, Shard]]:
    """Return for each parameter a slice with its tensor in this rank's engine, and the part that this tensor holds.
    Raise a ValueError if a parameter can't share the engine's memory."""
    placed = []
    for name, group in itertools.groupby(slices, key=lambda part: part.name):
        same_name = list(group)
        source = same_name[0].source
        shard = Shard.of_cuts(source.shape, [part.cut for part in same_name])
        place = _joined([part.destination for part in same_name], shard)
        part = dataclasses.replace(same_name[0], destination=place, cut=())
        local = dataclasses.replace(part, source=torch.empty(shard.local_shape, dtype=source.dtype, device="meta"))
        if reason := next((obstacle(one) for one in same_name if one.again), "") or obstacle(local):
            raise ValueError(
                f"Parameter {name} can't share the engine's memory ({reason}), as sharding: tensor requires. Set "
                "sharding: gradients or fsdp."
            )
        placed.append((part, shard))
    return placed


def _joined(places: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    first, *others = places
    previous = first
    for other in others:
        end = previous.storage_offset() + previous.shape[shard.axis] * previous.stride(shard.axis)
        assert other.storage_offset() == end and other.stride() == first.stride(), "the parts aren't adjacent"
        previous = other
    return first.as_strided(shard.local_shape, first.stride()) if others else first
