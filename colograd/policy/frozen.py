"""Models with weights that aren't trained: on the policy's device, or in host memory between uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from ..config import GRPOConfig


class FrozenModel:
    """A model with weights of its own, in evaluation mode, without gradients.

    Args:
        model: a model on ``device``, or on the host with ``offload``; it stays there between uses.
        device: device that runs the model.
    """

    of_policy = True  # whether it has the policy's architecture, and runs rows as the policy does

    def __init__(self, model: torch.nn.Module, device: torch.device, offload: bool) -> None:
        self.model: Any = model
        self.device, self.offload = device, offload

    @contextmanager
    def present(self) -> Iterator[torch.nn.Module]:
        """Yield the model on the policy's device; offloaded weights have a second place there meanwhile."""
        # Kernels that use the moved weights wait for the copies, because they run on the same stream.
        moved = (
            (parameter, torch.empty_like(parameter, device=self.device).copy_(parameter, non_blocking=True))
            for parameter in self.model.parameters()
        )
        with torch.no_grad(), values_in_place(moved if self.offload else ()):
            yield self.model

    def callback(self, policy: torch.nn.Module) -> TrainerCallback | None:
        """Return a callback that changes this model during the training of the policy; None: nothing does."""
        return None

    def where(self) -> str:
        """Describe the model's place and size for a log line."""
        nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        place = "in host memory between uses" if self.offload else "beside it"
        return f"{place} ({nbytes / 2**20:,.0f} MiB)"


@contextmanager
def values_in_place(values: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Exchange parameters' values while the context lasts; then the parameters have the same memory as before."""
    own: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    try:
        for parameter, value in values:
            own.append((parameter, parameter.data))
            parameter.data = value
        yield
    finally:
        for parameter, value in own:
            parameter.data = value


def offloads(config: GRPOConfig, asked: bool) -> bool:
    """Return whether a second model waits in host memory. Never on a CPU, where it would be in memory twice."""
    return asked and not config.on_cpu
