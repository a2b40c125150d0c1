"""`WeightSync`, the interface of publishing, and `PlannedSync`, the base of implementations that plan their copies."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch

from ..engine.protocol import Engine


class WeightSync(Protocol):
    """The interface of publishing: the engine gets the policy's weights. Users may write their own class."""

    @abstractmethod
    def publish(self, version: int) -> int:
        """Make the policy's present weights the engine's, then stamp the engine (`Engine.stamp`).

        Args:
            version: number of optimizer steps of these weights.

        Returns:
            Bytes written into the engine's tensors.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the start of a run: the way, the number of tensors, MiB per publish, and the reason."""

    @abstractmethod
    def differing(self) -> list[str]:
        """Return the names of parameters with another value in the engine than the policy's, cast, bit for bit."""


class Unserved(ValueError):
    """An adapted layer has no LoRA slot in the engine."""


class PlannedSync(WeightSync):
    """A `WeightSync` that plans its copies at start. Each publish checks that no tensor has moved since.

    A copy into a tensor's former memory would have no effect.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine) -> None:
        self.engine, self._policy = engine, policy
        self._planned = self._addresses()

    def publish(self, version: int) -> int:
        """See `WeightSync.publish`. The engine can't sample until this succeeds."""
        self.engine.invalidate()
        addresses = self._addresses()
        if addresses != self._planned:
            moved = [name for name in self._planned | addresses if self._planned.get(name) != addresses.get(name)]
            raise RuntimeError(
                f"{len(moved)} weights have moved since publishing was planned ({', '.join(moved[:3])}): a reload, "
                "`.to()` or `.data =` has replaced their tensors, and the engine would sample with other weights than "
                "the trained ones. Change weights in place (`copy_`), or build a new trainer."
            )
        nbytes = self.write()
        self.engine.stamp(version)
        return nbytes

    @abstractmethod
    def write(self) -> int:
        """Update the engine's tensors. Return the bytes written."""

    def _addresses(self) -> dict[str, int]:
        """Return the addresses of all tensors that must not move."""
        sides = (("policy", dict(self._policy.named_parameters())), ("engine", self.engine.tensors.parameters()))
        return {f"{side} {name}": p.data_ptr() for side, tensors in sides for name, p in tensors.items()}
