"""`sharding: none`: every rank has the whole gradient, summed once per step, and the whole optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..parallel.gradients import sum_gradients, zero_gradients
from . import optimizer_state
from .strategy import Owned, ShardingStrategy, WriteTensors, scale_down, squared_norm


class WholeCopies(ShardingStrategy):
    name = "none"

    def describe(self) -> str:
        return ""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: every rank's optimizer has all parameters."""

    def sum_gradients(self) -> None:
        parameters = list(self.model.parameters())
        if all(parameter.grad is None for parameter in parameters):  # a step without a micro-batch
            zero_gradients(parameters)
        self.traffic.reduced += sum_gradients(parameters, among=self.among)

    def gradients(self) -> Sequence[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self, largest: float) -> float:
        gradients = self.gradients()
        norm = squared_norm(gradients) ** 0.5
        scale_down(gradients, norm, largest)
        return norm

    def discard(self) -> None:
        """Do nothing: the caller sets the parameters' gradients to None before it repeats a step."""

    def owned(self) -> Sequence[Owned]:
        trained = self.model.named_parameters()
        return [Owned(name, p, 0, p.numel()) for name, p in trained if p.requires_grad]

    def gather_weights(self) -> None:
        """Do nothing: each rank has updated all weights."""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        return optimizer_state.can_be_cut(optimizer, owned)

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        if not self.cuts_optimizer(optimizer, self.owned()):
            return False
        if keep:
            optimizer_state.save(optimizer, self.owned(), folder, 0, 1, write)
        return True

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        if not optimizer_state.is_sharded(folder):
            return False
        optimizer_state.load(optimizer, self.owned(), folder)
        return True
