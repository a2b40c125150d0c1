"""The weight sync `copied`: the engine has a copy of the weights, and each sync copies and casts the policy's weights.

For a LoRA adapter that vLLM can't serve, the copy is W + scaling * B A, computed in float32 one layer at a time, and
rounded once. Merging into the policy's own weights would accumulate rounding errors.
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
    """A copy of ``slices`` into the engine, planned once. Computed values (dequantised ones) are made one by one."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        plain = [part for part in slices if not part.is_computed]
        self._computed = [part for part in slices if part.is_computed]
        # The sources are detached views of the policy's storage, so they stay valid while the optimizer writes in
        # place.
        self._sources = [part.held for part in plain]
        self._destinations = [part.destination for part in plain]
        self.nbytes = sum(part.destination.nbytes for part in slices)

    @torch.no_grad()
    def write(self) -> int:
        """Copy the policy's values into the engine, cast to the engine's dtype. Return the number of bytes written."""
        if self._sources:
            torch._foreach_copy_(self._destinations, self._sources)
        for part in self._computed:
            part.destination.copy_(part.held)
        return self.nbytes


class CopiedWeights(PlannedSync):
    """The weight sync that copies the policy into the engine. ``why`` is the reason that memory isn't shared."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.slices, self.why = list(slices), why
        self.copies = Copies(self.slices)
        self._later = Copies([part for part in slices if changes(part)])

    def describe(self) -> str:
        size = f"{self.copies.nbytes / 2**20:,.0f} MiB per publish"
        return f"weights: copied, {len(self.slices)} parameters, {size} ({self.why})"

    def write(self) -> int:
        """Copy the weights into the engine, and return the bytes. Frozen weights are copied in the first call only."""
        nbytes = self.copies.write()
        self.copies = self._later
        return nbytes

    def differing(self) -> list[str]:
        return [part.name for part in self.slices if not part.equal()]


def changes(part: Slice) -> bool:
    """Return whether the engine's value may change during training. Buffers may change without the optimizer."""
    is_parameter = isinstance(part.source, torch.nn.Parameter)
    return part.adapted is not None or part.source.requires_grad or not is_parameter


class MergedWeights(CopiedWeights):
    """The weight sync that merges a PeftModel's adapter into the engine's copy. ``why`` is the reason for merging."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        adapted = {layer.parameter: layer for layer in adapted_layers(policy)}
        copies, parts = dict(trained_copies(policy)), []
        for part in slices:
            name = part.plain_name
            source = copies.get(name, part.source)
            parts.append(dataclasses.replace(part, name=name, source=source, adapted=adapted.get(name)))
        super().__init__(policy, engine, parts, why)
        # Slices of weights that change in training, so that every weight sync copies them.
        self.moving = [part for part, new in zip(slices, parts, strict=True) if changes(new)]

    def describe(self) -> str:
        return (
            f"weights: copied, {len(self.moving)} tensors, {self._later.nbytes / 2**20:,.1f} MiB per publish "
            f"(the adapter is merged on its way into the engine's copy: {self.why})"
        )
