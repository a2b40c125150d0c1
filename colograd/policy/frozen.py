"""Models with frozen weights (reference, teacher), stored on the policy's device, or in host memory between uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from ..config import GRPOConfig


class FrozenModel:
    """A model besides the policy, in evaluation mode and without gradients, for example the reference model.

    Args:
        model: the model, on ``device``, or in host memory with ``offload``.
        device: the device that runs the model.
        offload: whether the weights stay in host memory between uses.
    """

    of_policy = True  # Whether the model has the policy's architecture, and takes rows in the same form as the policy.

    def __init__(self, model: torch.nn.Module, device: torch.device, offload: bool) -> None:
        self.model: Any = model
        self.device, self.offload = device, offload

    @contextmanager
    def present(self) -> Iterator[torch.nn.Module]:
        """Yield the model with its weights on the device. Offloaded weights are copied to the device in the context."""
        # Copies and kernels run on one stream, so a kernel starts after the copies of its weights.
        moved = (
            (parameter, torch.empty_like(parameter, device=self.device).copy_(parameter, non_blocking=True))
            for parameter in self.model.parameters()
        )
        with torch.no_grad(), values_in_place(moved if self.offload else ()):
            yield self.model

    def callback(self, policy: torch.nn.Module) -> TrainerCallback | None:
        """Return a callback that updates this model during the policy's training. None means that it stays constant."""
        return None

    def where(self) -> str:
        """Return a text for a log line about where the model's weights are stored, and their size in MiB."""
        nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        place = "in host memory between uses" if self.offload else "beside it"
        return f"{place} ({nbytes / 2**20:,.0f} MiB)"


@contextmanager
def values_in_place(values: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Set the ``data`` of parameters to given tensors inside the context, then restore the parameters' tensors."""
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
    """Return whether a frozen model's weights are stored in host memory between uses: if ``asked``, but never for a run
    on the CPU, where the weights would be in memory twice."""
    return asked and not config.on_cpu
