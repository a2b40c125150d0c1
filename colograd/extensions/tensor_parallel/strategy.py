"""Weight sync and sharding strategies of a policy in the engine's tensor-parallel layout.

The ranks of one engine train each row together. The ranks with the same part of the policy, one per engine, sum the
part's gradients. The policy's parameters, except an adapter's, share the memory of vLLM's tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...parallel import watchdog
from ...parallel.faults import telling
from ...parallel.ranks import gather, on_all_ranks
from ...parallel.shards import RankGroup, Shard
from ...policy.lora import Adapter, adapted_layers, base_name, is_adapted
from ...runtime.registry import hooks
from ...sharding import optimizer_state
from ...sharding.strategy import Owned, Write, squared_norm
from ...sharding.weight_files import WeightFiles, all_names, completed
from ...sharding.zero import SharedGradients, SharedOptimizer, SharedRows, WholeCopies
from ...weights import WeightSync, proof
from ...weights.mapping import Slice
from ...weights.selection import Pairing, move
from ...weights.sync import SharedWeights, Unserved, obstacle
from .layers import TensorParts, adapter_shards, split


def weights_in_parts(pairing: Pairing, adapter: Adapter | None) -> WeightSync:
    """Replace a whole policy's parameters by this rank's parts, in the memory of the engine's tensors. Return the
    weight sync. An adapter is divided like vLLM's LoRA slots, but has memory of its own."""
    policy, engine = pairing.policy, pairing.engine
    with on_all_ranks("the plan of the policy's parts"):
        parts = _parts(pairing.slices)
    pairing.unread()
    with torch.no_grad():
        for part, own in parts:
            part.destination.copy_(own.of(part.source.detach()))
            part.source.data = part.destination  # frees the whole parameter
    shards, lora_shards = {part.name: shard for part, shard in parts}, dict[int, Shard]()
    if adapter is not None:
        lora_shards = adapter_shards(adapted_layers(policy), {str(base_name(name)): s for name, s in shards.items()})
        for name, parameter in policy.named_parameters():
            if (shard := lora_shards.get(id(parameter))) is not None:
                parameter.data, shards[name] = shard.of(parameter.detach()).clone(), shard
    move(policy, pairing.device)
    split(policy, shards, engine.layout)
    sync: WeightSync = (base := SharedWeights(policy, engine, [part for part, _ in parts]))
    if adapter is not None:
        try:
            (map_adapter,), (adapter_weights,) = hooks("map_adapter"), hooks("adapter_weights")
            sync = adapter_weights(policy, engine, map_adapter(policy, engine, lora_shards), base)
        except Unserved as unserved:
            raise ValueError(f"{unserved}. `sharding: tensor` can't merge adapters: set sharding: gradients.") from None
    if not pairing.equal:
        proof.check_same(policy, engine)
    return sync


def _parts(slices: Sequence[Slice]) -> list[tuple[Slice, Shard]]:
    """Join each parameter's slices into one slice. Return (slice, shard) per parameter. The slice's destination is this
    rank's engine memory for the parameter. The shard describes the part of the parameter in this memory."""
    placed = []
    for name, group in itertools.groupby(slices, key=lambda part: part.name):
        same_name = list(group)
        source = same_name[0].source
        shard = Shard.of_cuts(source.shape, [part.cut for part in same_name])
        first, *others = places = [part.destination for part in same_name]
        for one, other in itertools.pairwise(places):
            end = one.storage_offset() + one.shape[shard.axis] * one.stride(shard.axis)
            assert other.storage_offset() == end and other.stride() == first.stride(), "the parts aren't adjacent"
        place = first.as_strided(shard.local_shape, first.stride()) if others else first
        part = dataclasses.replace(same_name[0], destination=place, cut=())
        local = dataclasses.replace(part, source=torch.empty(shard.local_shape, dtype=source.dtype, device="meta"))
        if reason := next((obstacle(one) for one in same_name if one.again), "") or obstacle(local):
            raise ValueError(
                f"Parameter {name} can't share the engine's memory ({reason}), but `sharding: tensor` requires it. "
                "Set sharding to gradients or fsdp."
            )
        placed.append((part, shard))
    return placed


class TensorStrategy(SharedRows):
    """Base class of the tensor-parallel strategies. A strategy's second base class, from `sharding.zero`, sums
    gradients over the ranks with the same part of the policy (one rank per engine)."""

    shared_out: str  # Name of the state that ranks with the same part of the policy divide. Empty without such state.

    def __init__(self, model: Any) -> None:
        self.cut: TensorParts = model.tensor_parts
        super().__init__(model)
        # Names of parameters that this rank adds to the gradient's norm: of ranks with equal parts, the first counts.
        self._counted = {name for name in self.cut.shards if self.cut.holders(name)[0] == self.cut.engine.place}

    @property
    def among(self) -> RankGroup:
        return self.cut.data

    @property
    def row(self) -> RankGroup:
        return self.cut.engine

    def describe(self) -> str:
        local = sum(parameter.numel() for parameter in self.model.parameters())
        data = self.cut.data.size
        shared = f"; {self.shared_out} in {data} parts" if self.shared_out and data > 1 else ""
        return (
            f"sharding: the policy is in the engine's layout, {local / 1e6:,.1f} M of its "
            f"{self.cut.elements / 1e6:,.1f} M parameters on this rank; {self.row.size} ranks train each row together, "
            f"gradients are summed over {data}{shared}"
        )

    def sum_of_squares(self) -> float:
        pieces = [piece for piece in self.owned() if piece.part.grad is not None and piece.name in self._counted]
        local = squared_norm(piece.part.grad for piece in pieces)
        if self.shared_out:  # With ZeRO all ranks' pieces are the whole gradient, otherwise each engine's pieces are.
            return self.sum_over_parts(local)
        return float(self.cut.engine.sum_(torch.tensor(local, dtype=torch.float64, device=self.device)))

    def owned(self) -> Sequence[Owned]:
        pieces = []
        for piece in super().owned():  # type: ignore[safe-super]
            shard = self.cut.shards[piece.name]
            if shard.begin is None:
                pieces.append(dataclasses.replace(piece, shard=shard))
            else:
                start, stop = piece.start + shard.begin, piece.stop + shard.begin
                pieces.append(dataclasses.replace(piece, start=start, stop=stop))
        return pieces

    @telling("saving")
    def state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        cut, whole = self.cut, dict[str, torch.Tensor]()
        for name, parameter in self._saved():
            if keep:
                whole[name] = torch.empty(cut.shards[name].shape, dtype=parameter.dtype)
            for place in sorted({cut.holders(name, place)[0] for place in range(cut.engine.size)}):
                part = cut.places[place][name]
                values = parameter.detach().contiguous()
                if cut.shards[name] != part:
                    values = values.new_empty(part.local_shape)
                if not part.is_whole:
                    cut.engine.broadcast_(values, place)
                if keep:
                    part.write(values.cpu(), whole[name])
            watchdog.progress()
        if is_adapted(self.model):
            return whole
        return completed(whole, self.model) if keep else {}

    def _saved(self) -> list[tuple[str, torch.nn.Parameter]]:
        adapter_alone = is_adapted(self.model)
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad or not adapter_alone]

    def load_weights(self, folder: Path) -> bool:
        if not is_adapted(self.model):
            files, names = WeightFiles(folder), all_names(self.model)
            for name, parameter in self.model.named_parameters():
                files.copy_part(names[id(parameter)], parameter.detach(), self.cut.shards[name])
            return True
        (adapter,) = self.model.active_adapters
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, parameter in self._saved():
            saved = tensors.get(name.replace(f".{adapter}.", "."))
            shard = self.cut.shards[name]
            if saved is None or tuple(saved.shape) != shard.shape:
                actual = "is missing" if saved is None else f"has the shape {tuple(saved.shape)}"
                raise ValueError(
                    f"The adapter in {str(folder)!r} doesn't fit the policy: {name} {actual}, but must have the shape "
                    f"{shard.shape}. Resume from a checkpoint of a run with the same LoRA settings."
                )
            parameter.detach().copy_(shard.of(saved))
        return True


class TensorParallel(TensorStrategy, WholeCopies):
    shared_out = ""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        return True

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: Write = save_file
    ) -> bool:
        """Write this rank's optimizer state if ``keep`` is true on any rank of this rank's engine. A collective."""
        engine = self.cut.engine
        keeps = gather(keep)
        if any(keeps[rank] for rank in engine.ranks):
            optimizer_state.save(optimizer, self.owned(), folder, engine.place, engine.size, write)
        return True

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        engine = self.cut.engine
        optimizer_state.load(optimizer, self.owned(), folder, order, engine.place, engine.size)
        return True


class TensorOptimizer(TensorStrategy, SharedOptimizer):
    """Strategy `tensor+optimizer`: ranks with the same policy part divide its optimizer state (ZeRO-1)."""


class TensorGradients(TensorStrategy, SharedGradients):
    """Strategy `tensor+gradients`: ranks with the same policy part also divide its gradients (ZeRO-2)."""

    backward = SharedGradients.backward
