"""Sharding strategies of a policy in the engine's tensor-parallel layout (`sharding: tensor`, `tensor+optimizer`,
`tensor+gradients`). `layers.split` has divided the policy's layers before.

The ranks of one engine train each row together. The ranks with the same part of the policy, one per engine, sum the
part's gradients. `tensor+optimizer` and `tensor+gradients` divide optimizer state or gradients among these ranks. Every
parameter shares the memory of a vLLM tensor. So an optimizer step, with ZeRO's all-gather, updates the engine, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...parallel import watchdog
from ...parallel.faults import telling
from ...parallel.ranks import gather
from ...parallel.shards import RankGroup
from ...policy.lora import is_adapted
from ...sharding import optimizer_state
from ...sharding.strategy import Owned, Write, squared_norm
from ...sharding.weight_files import WeightFiles, all_names, completed
from ...sharding.zero import SharedGradients, SharedOptimizer, SharedRows, WholeCopies
from .layers import TensorParts


class TensorStrategy(SharedRows):
    """Base class of the three tensor-parallel strategies. A ZeRO class, as a further base class of each strategy, works
    among the ranks that have the same part of the policy (one rank per engine)."""

    state_of = ""  # Name of the state that the ranks with the same part of the policy divide. Empty: none.

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        # Names of parameters that this rank adds to the gradient's norm. If ranks have the same part, one rank adds it.
        self._counted = {name for name in self.cut.shards if self.cut.holders(name)[0] == self.cut.engine.place}

    @property
    def cut(self) -> TensorParts:
        parts: TensorParts = self.model.tensor_parts
        return parts

    @property
    def among(self) -> RankGroup:
        return self.cut.data

    @property
    def row(self) -> RankGroup:
        return self.cut.engine

    def describe(self) -> str:
        local = sum(parameter.numel() for parameter in self.model.parameters())
        size, data = self.cut.engine.size, self.cut.data.size
        parallel = "tensor parallel" if self.row.size == size else f"tensor parallel among {size} of them"
        shared = f"; {self.state_of} in {data} parts" if self.state_of and data > 1 else ""
        whole = self.cut.elements
        return (
            f"sharding: the policy is in the engine's layout, {local / 1e6:,.1f} M of its {whole / 1e6:,.1f} M "
            f"parameters on this rank; {self.row.size} ranks train each row together ({parallel}), gradients are "
            f"summed over {data}{shared}"
        )

    def sum_of_squares(self) -> float:
        """Return the sum of squares of the whole gradient. A part that several ranks have counts once."""
        pieces = [piece for piece in self.owned() if piece.part.grad is not None and piece.name in self._counted]
        local = squared_norm(piece.part.grad for piece in pieces)
        if self.state_of:  # With ZeRO all ranks together hold the gradient. Otherwise an engine's ranks hold it.
            return self.sum_over_parts(local)
        return float(self.cut.engine.sum_(torch.tensor(local, dtype=torch.float64, device=self.device)))

    def owned(self) -> Sequence[Owned]:
        """Return the pieces of parameters that this rank updates, with their positions in the whole parameters."""
        found = []
        for piece in super().owned():  # type: ignore[safe-super]
            shard = self.cut.shards[piece.name]
            if shard.begin is None:
                found.append(dataclasses.replace(piece, shard=shard))
            else:
                start, stop = piece.start + shard.begin, piece.stop + shard.begin
                found.append(dataclasses.replace(piece, start=start, stop=stop))
        return found

    @telling("saving")
    def state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return the state dict of the whole policy or of its LoRA adapter, empty without ``keep``. A collective."""
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
        tensors = load_file(folder / "adapter_model.safetensors")  # Each rank reads the whole adapter, which is small.
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
    """Strategy `sharding: tensor`: each rank has the gradient and optimizer state of its whole part of the policy."""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        return True

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: Write = save_file
    ) -> bool:
        """Write the optimizer state of this rank's part if ``keep`` is true on any rank of its engine. A collective."""
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
    """Strategy `sharding: tensor+optimizer`: ranks with the same policy part divide its optimizer state (ZeRO-1)."""

    state_of = "optimizer state"


class TensorGradients(TensorStrategy, SharedGradients):
    """Strategy `sharding: tensor+gradients`: ranks with the same policy part divide its optimizer state and
    gradients."""

    state_of = "optimizer state and gradients"
    backward = SharedGradients.backward
