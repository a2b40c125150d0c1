"""`copied`: the engine has its own copy of the weights; a publish is one in-place pass over the bytes.

The plan (which view goes to which slice) is made once. Publishing then is one multi-tensor copy that also casts: no
name look-ups, no per-tensor loader.
"""

from __future__ import annotations

import torch

from ..engine import Engine
from .mapping import Slice, map_parameters

MOVED = (
    "A weight of the policy or of the engine lies elsewhere than when publishing was planned (a reload or `.to()` "
    "rebinds tensors): build a new trainer."
)


class CopiedWeights:
    """Copies the policy into the engine, cast to the engine's dtype."""

    way = "copied"

    def __init__(self, policy: torch.nn.Module, engine: Engine) -> None:
        self.engine = engine
        self.slices: list[Slice] = map_parameters(policy, engine.model)
        # Detached views share the policy's storage: they stay valid while the optimizer writes in place.
        self._sources = [part.source.detach() for part in self.slices]
        self._destinations = [part.destination for part in self.slices]
        self._pointers = self._data_pointers()

    @property
    def nbytes(self) -> int:
        """Bytes that a publish writes."""
        return sum(d.numel() * d.element_size() for d in self._destinations)

    def describe(self) -> str:
        return (
            f"weights: copied, {len(self.slices)} parameters, {self.nbytes / 2**20:,.0f} MiB per publish (the engine "
            "has its own copy)"
        )

    @torch.no_grad()
    def publish(self, version: int) -> int:
        """Make the policy's weights the engine's, and stamp it with ``version``. Returns the bytes written.

        Raises:
            RuntimeError: a tensor of the policy or the engine has moved since the plan was made.
        """
        if self._data_pointers() != self._pointers:
            raise RuntimeError(MOVED)
        torch._foreach_copy_(self._destinations, self._sources)
        self.engine.stamp(version)
        return self.nbytes

    def differing(self) -> list[str]:
        """Names of parameters whose value in the engine isn't the policy's, cast, bit for bit."""
        return [part.name for part in self.slices if not part.equal()]

    def _data_pointers(self) -> list[int]:
        return [part.source.data_ptr() for part in self.slices] + [d.data_ptr() for d in self._destinations]
