"""`WeightSync`: the interface that puts the policy's weights into the engine. `PlannedSync`: its base class."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch

from ..engine.protocol import Engine


class WeightSync(Protocol):
    """The interface of weight syncs, which give the engine the policy's weights. Users may write a class."""

    @abstractmethod
    def publish(self, version: int) -> int:
        """Give the engine the policy's present weights, and call `Engine.stamp` with ``version``.

        Args:
            version: number of optimizer steps that the policy has been trained for.

        Returns:
            Number of bytes written into the engine's tensors.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the log at start: the kind of sync, number of tensors, MiB per sync, and the reason."""

    @abstractmethod
    def differing(self) -> list[str]:
        """Return names of parameters that differ, bit for bit in the narrower dtype, between policy and engine."""


class Unserved(ValueError):
    """The error that vLLM has no LoRA slot for a layer that the adapter changes."""


class PlannedSync(WeightSync):
    """A `WeightSync` that plans copies at start. `publish` checks that all tensors have the addresses of the start."""

    def __init__(self, policy: torch.nn.Module, engine: Engine) -> None:
        self.engine, self._policy = engine, policy
        self._planned = self._addresses()

    def publish(self, version: int) -> int:
        """Write the policy's weights into the engine, and stamp the engine. After an error the engine can't sample."""
        self.engine.invalidate()
        addresses = self._addresses()
        if addresses != self._planned:
            moved = [name for name in self._planned | addresses if self._planned.get(name) != addresses.get(name)]
            raise RuntimeError(
                f"{len(moved)} weights have moved since publishing was planned ({', '.join(moved[:3])}): a reload, "
                "`.to()` or `.data =` has replaced tensors of the policy or the engine. The engine would sample with "
                "outdated weights. Change weights in place (`copy_`), or build a new trainer."
            )
        nbytes = self.write()
        self.engine.stamp(version)
        return nbytes

    @abstractmethod
    def write(self) -> int:
        """Write the policy's weights into the engine's tensors. Return the number of bytes written."""

    def _addresses(self) -> dict[str, int]:
        """Return the memory addresses of the policy's and the engine's parameters, which must not change."""
        sides = (("policy", dict(self._policy.named_parameters())), ("engine", self.engine.tensors.parameters()))
        return {f"{side} {name}": p.data_ptr() for side, tensors in sides for name, p in tensors.items()}
