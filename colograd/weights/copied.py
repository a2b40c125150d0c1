"""`copied`: the engine has its own copy of the weights; a publish is one planned copy, which also casts.

For an adapter that vLLM can't serve the copy is W + scaling * B A. Each publish computes it in float32, a layer at a
time, and rounds it once: merging the policy itself would drift.
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


class MergedWeights(PlannedSync):
    """Publishes a PeftModel as the weights it amounts to; what isn't trained of its base only once. ``why`` says why
    the adapter isn't served."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice], why: str) -> None:
        super().__init__(policy, engine)
        self.why = why
        adapted = {layer.parameter: layer for layer in adapted_layers(policy)}
        places = [(base_name(part.name) or part.name, part) for part in slices]  # a parameter may have several
        copies = dict(trained_copies(policy))
        self._merged = [(adapted[name], part) for name, part in places if name in adapted]
        self._whole = [
            dataclasses.replace(part, name=name, source=copies[name]) if name in copies else part
            for name, part in places
            if name in copies or (part.source.requires_grad and name not in adapted)
        ]
        moving = adapted.keys() | copies.keys() | {base_name(part.name) or part.name for part in self._whole}
        self.moving = [part for name, part in places if name in moving]  # what each publish writes
        self._still = [part for name, part in places if name not in moving]
        self._copies, self._copies_of_base = Copies(self._whole), Copies(self._still)
        self._base_is_there = False

    @property
    def nbytes(self) -> int:
        """Bytes that a publish writes, after the first."""
        return self._copies.nbytes + sum(part.destination.nbytes for _, part in self._merged)

    def describe(self) -> str:
        tensors = len(self._merged) + len(self._whole)
        return (
            f"weights: copied, {tensors} tensors, {self.nbytes / 2**20:,.1f} MiB per publish "
            f"(the adapter is merged on its way into the engine's copy: {self.why})"
        )

    @torch.no_grad()
    def write(self) -> int:
        first = 0 if self._base_is_there else self._copies_of_base.write()
        self._base_is_there = True
        self._copies.write()
        for layer, part in self._merged:
            part.destination.copy_(part.part_of(layer.merged()))
        return first + self.nbytes

    def differing(self) -> list[str]:
        """See `WeightSync.differing`; of an adapted layer, merged in float32 and rounded once."""
        names = [part.name for part in (*self._still, *self._whole) if not part.equal()]
        for layer, part in self._merged:
            if not torch.equal(part.destination, part.part_of(layer.merged()).to(part.destination.dtype)):
                names.append(layer.parameter)
        return names
