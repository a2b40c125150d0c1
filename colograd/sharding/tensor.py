"""A policy in the engine's tensor-parallel layout, as `policy.tensor_parallel` has cut it: the ranks of one engine
train each row together, and ranks with the same part (one of each engine) share out gradients and optimizer state.

As every parameter is the very tensor of vLLM's rank, an optimizer's step, and after it the all-gather of ZeRO, is the
publishing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..parallel import watchdog
from ..parallel.faults import telling
from ..parallel.ranks import gather
from ..parallel.shards import RankGroup
from ..policy.lora import is_adapted
from ..policy.tensor_parallel import TensorParts, parts_of
from . import optimizer_state
from .shared_rows import SharedRows, SharedTokens
from .strategy import Owned, WriteTensors, scale_down, squared_norm
from .weight_files import WeightFiles, all_names, completed
from .whole import WholeCopies
from .zero import SharedGradients, SharedOptimizer


class TensorStrategy(SharedRows):
    """What the three of them have in common. The rest is another strategy's, among the ranks with the same part."""

    state_of = ""  # what the ranks with the same part share out

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._counted = {name for name in self.cut.shards if self.cut.is_counted(name)}

    @property
    def cut(self) -> TensorParts:
        found = parts_of(self.model)
        assert found is not None, "the policy isn't cut"
        return found

    @property
    def among(self) -> RankGroup:
        return self.cut.data

    @property
    def row(self) -> RankGroup:
        return self.cut.engine

    def describe(self) -> str:
        own = sum(parameter.numel() for parameter in self.model.parameters())
        size, data = self.cut.engine.size, self.cut.data.size
        parallel = "tensor parallel" if self.row.size == size else f"tensor parallel among {size} of them"
        shared = f"; {self.state_of} in {data} parts" if self.state_of and data > 1 else ""
        whole = self.cut.elements
        return (
            f"sharding: the policy lies in the engine's layout, {own / 1e6:,.1f} M of its {whole / 1e6:,.1f} M "
            f"parameters on this rank; {self.row.size} ranks train each row together ({parallel}), gradients are "
            f"summed over {data}{shared}"
        )

    # -- a step

    def _sum_of_squares(self, own: float) -> float:
        """Over the ranks that have the gradient together."""
        device = next(self.model.parameters()).device
        return float(self.cut.engine.sum_(torch.tensor(own, dtype=torch.float64, device=device)))

    def clip(self, largest: float) -> float:
        """A part that several ranks have alike counts once."""
        summed = {piece.name: piece.part.grad for piece in self.owned() if piece.part.grad is not None}
        own = squared_norm(gradient for name, gradient in summed.items() if name in self._counted)
        norm = self._sum_of_squares(own) ** 0.5
        scale_down([*summed.values()], norm, largest)
        return norm

    def owned(self) -> Sequence[Owned]:
        return [self._in_whole(piece) for piece in super().owned()]  # type: ignore[safe-super]

    def _in_whole(self, piece: Owned) -> Owned:
        """A piece of this rank's part of a parameter as one of the parameter."""
        shard = self.cut.shards[piece.name]
        if shard.begin is None:
            return dataclasses.replace(piece, shard=shard)
        return dataclasses.replace(piece, start=piece.start + shard.begin, stop=piece.stop + shard.begin)

    # -- files

    @telling("saving")
    def state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        """Of a LoRA policy, the adapter's alone."""
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
        if is_adapted(self.model):
            self._load_adapter(folder)
            return True
        files, names = WeightFiles(folder), all_names(self.model)
        for name, parameter in self.model.named_parameters():
            files.copy_part(names[id(parameter)], parameter.detach(), self.cut.shards[name])
        return True

    def _load_adapter(self, folder: Path) -> None:
        """It is small: each rank reads all of it."""
        (adapter,) = self.model.active_adapters
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, parameter in self._saved():
            saved = tensors.get(name.replace(f".{adapter}.", "."))
            shard = self.cut.shards[name]
            if saved is None or tuple(saved.shape) != shard.shape:
                found = "isn't there" if saved is None else f"is of the shape {tuple(saved.shape)}"
                raise ValueError(
                    f"The adapter in {str(folder)!r} is another than the policy's: {name} {found}, but must be of "
                    f"{shard.shape}. Give the checkpoint of a run with the same LoRA settings."
                )
            parameter.detach().copy_(shard.of(saved))


class TensorParallel(TensorStrategy, WholeCopies):
    """Each engine's ranks hold gradients and optimizer state of all of their parts."""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        return True

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        """``keep``, on the first of an engine's ranks, has all of them write."""
        engine = self.cut.engine
        kept = gather(keep)
        if any(kept[rank] for rank in engine.ranks):
            optimizer_state.save(optimizer, self.owned(), folder, engine.place, engine.size, write)
        return True

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        engine = self.cut.engine
        optimizer_state.load(optimizer, self.owned(), folder, order, engine.place, engine.size)
        return True


class TensorOptimizer(TensorStrategy, SharedOptimizer):
    """And the ranks with the same part share out the optimizer's state (ZeRO-1)."""

    state_of = "optimizer state"

    def _sum_of_squares(self, own: float) -> float:
        return _over_all(own, self.device)


class TensorGradients(TensorStrategy, SharedGradients):
    """And its gradients (ZeRO-2)."""

    state_of = "optimizer state and gradients"
    backward = SharedGradients.backward

    def _sum_of_squares(self, own: float) -> float:
        return _over_all(own, self.device)


class RowsOfTensorParallel(SharedTokens, TensorParallel):
    """With a row's tokens shared out among engines, as those of the two below."""


class RowsOfTensorOptimizer(SharedTokens, TensorOptimizer):
    pass


class RowsOfTensorGradients(SharedTokens, TensorGradients):
    backward = SharedGradients.backward


def _over_all(own: float, device: torch.device) -> float:
    total = torch.tensor(own, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return float(total)
