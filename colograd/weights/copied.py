"""`copied`: the engine has its own copy of the weights. A publish is one planned copy, which also casts.

For an adapter that vLLM can't serve, the copy is W + scaling * B A. Each publish computes it in float32, one layer at a
time, and rounds it once. Merging into the policy itself would accumulate rounding errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..engine.protocol import Engine
from ..policy.lora import adapted_layers, base_name, trained_copies
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
    """Copies the policy into the engine, cast to the engine's dtype. ``why`` memory isn't shared is for `describe`."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.slices, self.why = list(slices), why
        self.copies = Copies(self.slices)
        # Buffers may change without the optimizer.
        changing = [p for p in slices if p.source.requires_grad or not isinstance(p.source, torch.nn.Parameter)]
        self._later = Copies(changing) if len(changing) < len(slices) else self.copies  # without frozen weights

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


class MergedWeights(PlannedSync):
    """Publishes a PeftModel as merged weights, and the unchanged weights of its base only once.

    ``slices`` are the places of the base's parameters. ``why`` vLLM doesn't serve the adapter is for `describe`.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.why = why
        adapted = {layer.parameter: layer for layer in adapted_layers(policy)}
        places = [(base_name(part.name) or part.name, part) for part in slices]  # one name may have several places
        copies = dict(trained_copies(policy))
        self._merged = [(adapted[name], part) for name, part in places if name in adapted]
        self._whole = [
            dataclasses.replace(part, name=name, source=copies[name]) if name in copies else part
            for name, part in places
            if name in copies or (part.source.requires_grad and name not in adapted)
        ]
        moving = adapted.keys() | copies.keys() | {base_name(part.name) or part.name for part in self._whole}
        self.moving = [part for name, part in places if name in moving]  # each publish writes these
        self._constant = [part for name, part in places if name not in moving]
        self._copies, self._copies_of_base = Copies(self._whole), Copies(self._constant)
        self._has_base = False

    @property
    def nbytes(self) -> int:
        """Bytes that a publish writes, after the first publish."""
        return self._copies.nbytes + sum(part.destination.nbytes for _, part in self._merged)

    def describe(self) -> str:
        tensors = len(self._merged) + len(self._whole)
        return (
            f"weights: copied, {tensors} tensors, {self.nbytes / 2**20:,.1f} MiB per publish "
            f"(the adapter is merged on its way into the engine's copy: {self.why})"
        )

    @torch.no_grad()
    def write(self) -> int:
        base_bytes = 0 if self._has_base else self._copies_of_base.write()
        self._has_base = True
        self._copies.write()
        for layer, part in self._merged:
            part.destination.copy_(part.part_of(layer.merged()))
        return base_bytes + self.nbytes

    def differing(self) -> list[str]:
        """See `WeightSync.differing`. The value of an adapted layer is merged in float32 and rounded once."""
        names = [part.name for part in (*self._constant, *self._whole) if not part.equal()]
        for layer, part in self._merged:
            if not torch.equal(part.destination, part.part_of(layer.merged()).to(part.destination.dtype)):
                names.append(layer.parameter)
        return names
