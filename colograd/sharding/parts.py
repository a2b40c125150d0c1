"""The base of strategies that give each rank's optimizer parts of the parameters."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ..parallel.ranks import rank, world_size
from . import optimizer_state
from .strategy import ShardingStrategy, WriteTensors, scale_down, squared_norm


class SharedParts(ShardingStrategy):
    """A strategy with one rank per element of a trained parameter, which has its summed gradient and updates it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.parts = world_size() if self.among is None else self.among.size
        self._order: list[str] = []  # names of all trained parameters, as in an optimizer without sharding

    @abstractmethod
    def _after_step(self) -> None:
        """Finish an optimizer step."""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        pieces = {piece.name: piece.part for piece in self.owned()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in optimizer.param_groups:
            named = [names[id(parameter)] for parameter in group["params"]]
            self._order += named
            group["params"] = [pieces[name] for name in named if name in pieces]
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def clip(self, largest: float) -> float:
        sums = self.gradients()
        total = torch.tensor(squared_norm(sums), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        norm = float(total) ** 0.5
        scale_down(sums, norm, largest)
        return norm

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the collectives."""

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        optimizer_state.save(optimizer, self.owned(), folder, rank(), world_size(), write)
        return True

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        optimizer_state.load(optimizer, self.owned(), folder, self._order, rank(), world_size())
        return True
