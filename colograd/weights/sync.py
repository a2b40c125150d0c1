"""`WeightSync`: how the engine gets the policy's weights; `PlannedSync`: those that plan their copies at start."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch

from ..engine.protocol import Engine


class WeightSync(Protocol):
    """How the engine gets the policy's weights. A class of the user's may be one."""

    @abstractmethod
    def publish(self, version: int) -> int:
        """Make the policy's present weights the engine's, then stamp it with ``version`` (`Engine.stamp`), the
        optimizer steps that made them. Returns the bytes written into the engine's tensors."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the start of a run: which way, how many tensors, how many MiB per publish, and why."""

    @abstractmethod
    def differing(self) -> list[str]:
        """Names of the parameters whose value in the engine isn't the policy's, cast to its dtype, bit for bit."""


class PlannedSync(WeightSync):
    """A `WeightSync` that knows from the start which tensor goes where, and notices at each publish when one has moved:
    it would go into memory that nobody reads.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine) -> None:
        self.engine, self._policy = engine, policy
        self._planned = self._addresses()

    def publish(self, version: int) -> int:
        """See `WeightSync.publish`. Until it succeeds, nothing can be sampled.

        Raises:
            RuntimeError: a tensor of the policy or the engine has moved since the plan was made.
        """
        self.engine.invalidate()
        found = self._addresses()
        if found != self._planned:
            moved = [name for name in self._planned | found if self._planned.get(name) != found.get(name)]
            raise RuntimeError(
                f"{len(moved)} weights lie elsewhere than when publishing was planned ({', '.join(moved[:3])}): "
                "a reload, `.to()` or `.data =` has replaced their tensors, and the engine would sample from others "
                "than are trained. Change weights in place (`copy_`), or build a new trainer."
            )
        written = self.write()
        self.engine.stamp(version)
        return written

    @abstractmethod
    def write(self) -> int:
        """Bring the engine's tensors up to date. Returns the bytes written."""

    def _addresses(self) -> dict[str, int]:
        sides = (("policy", dict(self._policy.named_parameters())), ("engine", self.engine.tensors.parameters()))
        return {f"{side} {name}": p.data_ptr() for side, tensors in sides for name, p in tensors.items()}
