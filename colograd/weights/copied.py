"""`copied`: the engine has its own copy of the weights; a publish is one planned copy, which also casts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.protocol import Engine
from .mapping import Slice
from .sync import PlannedSync


class Copies:
    """A copy of ``slices``, planned once. Values that are computed (dequantised, say) are so one slice at a time."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        plain = [part for part in slices if not part.is_computed]
        self._computed = [part for part in slices if part.is_computed]
        # Detached views share the policy's storage: they stay valid while the optimizer writes in place.
        self._sources = [part.held for part in plain]
        self._destinations = [part.destination for part in plain]
        self.nbytes = sum(part.destination.nbytes for part in slices)

    @torch.no_grad()
    def write(self) -> int:
        """Write the sources, cast, into the destinations. Returns the bytes written."""
        if self._sources:
            torch._foreach_copy_(self._destinations, self._sources)
        for part in self._computed:
            part.destination.copy_(part.held)
        return self.nbytes


class CopiedWeights(PlannedSync):
    """Copies the policy into the engine, cast to the engine's dtype; ``why`` says why the memory isn't shared."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.slices, self.why = list(slices), why
        self.copies, self._copied = Copies(self.slices), list(self.slices)
        self._once = not all(map(_is_trained, self._copied))

    def describe(self) -> str:
        size = f"{self.copies.nbytes / 2**20:,.0f} MiB per publish"
        return f"weights: copied, {len(self.slices)} parameters, {size} ({self.why})"

    def write(self) -> int:
        """What isn't trained (a frozen vision tower, say) is written once."""
        written = self.copies.write()
        if self._once:
            self.copies, self._once = Copies([part for part in self._copied if _is_trained(part)]), False
        return written

    def differing(self) -> list[str]:
        return [part.name for part in self.slices if not part.equal()]


def _is_trained(part: Slice) -> bool:
    """Buffers may change by themselves."""
    return part.source.requires_grad or not isinstance(part.source, torch.nn.Parameter)
