"""`copied`: the engine has its own copy of the weights. A publish is one planned copy, which also casts.

For an adapter that vLLM can't serve, the copy is W + scaling * B A. Each publish computes it in float32, one layer at a
time, and rounds it once. Merging into the policy itself would accumulate rounding errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..engine.protocol import Engine
from ..policy.lora import adapted_layers, trained_copies
from .mapping import Slice
from .sync import PlannedSync


class Copies:
    """A planned copy of ``slices``. Computed values (dequantised ones, say) are computed one slice at a time."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        plain = [part for part in slices if not part.is_computed]
        self._computed = [part for part in slices if part.is_computed]
        # Detached views share the policy's storage, so they stay valid while the optimizer writes in place.
        self._sources = [part.held for part in plain]
        self._destinations = [part.destination for part in plain]
        self.nbytes = sum(part.destination.nbytes for part in slices)

    @torch.no_grad()
    def write(self) -> int:
        """Cast the sources and write them into the destinations. Return the bytes written."""
        if self._sources:
            torch._foreach_copy_(self._destinations, self._sources)
        for part in self._computed:
            part.destination.copy_(part.held)
        return self.nbytes


class CopiedWeights(PlannedSync):
    """Copies the policy into the engine, cast to the engine's dtype. ``why``: the reason that memory isn't shared."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.slices, self.why = list(slices), why
        self.copies = Copies(self.slices)
        self._later = Copies([part for part in slices if changes(part)])

    def describe(self) -> str:
        size = f"{self.copies.nbytes / 2**20:,.0f} MiB per publish"
        return f"weights: copied, {len(self.slices)} parameters, {size} ({self.why})"

    def write(self) -> int:
        """Write the weights; frozen ones (a vision tower, say) only in the first call. Return the bytes written."""
        nbytes = self.copies.write()
        self.copies = self._later
        return nbytes

    def differing(self) -> list[str]:
        return [part.name for part in self.slices if not part.equal()]


def changes(part: Slice) -> bool:
    """Return whether the engine's value may change. Buffers may change without the optimizer."""
    is_parameter = isinstance(part.source, torch.nn.Parameter)
    return part.adapted is not None or part.source.requires_grad or not is_parameter


class MergedWeights(CopiedWeights):
    """Publishes a PeftModel as merged weights, and the unchanged weights of its base only once.

    ``slices`` are the places of the base's parameters. ``why`` vLLM doesn't serve the adapter is for `describe`.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        adapted = {layer.parameter: layer for layer in adapted_layers(policy)}
        copies, parts = dict(trained_copies(policy)), []
        for part in slices:
            name = part.plain_name
            source = copies.get(name, part.source)
            parts.append(dataclasses.replace(part, name=name, source=source, adapted=adapted.get(name)))
        super().__init__(policy, engine, parts, why)
        # The places that each publish writes.
        self.moving = [part for part, new in zip(slices, parts, strict=True) if changes(new)]

    def describe(self) -> str:
        return (
            f"weights: copied, {len(self.moving)} tensors, {self._later.nbytes / 2**20:,.1f} MiB per publish "
            f"(the adapter is merged on its way into the engine's copy: {self.why})"
        )
