"""`gathered`: each rank holds some rows of the policy; a publish brings all of them, a few at a time, into each engine.

Rows go from the exchange straight to their places, already cast: no block of the policy is whole beside the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..engine.protocol import Engine
from ..sharding.rows import ELEMENTS, Rows, cuts_of, gathered
from .mapping import Slice
from .sync import PlannedSync


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in this rank's part of the engine, see `Slice`."""

    destination: torch.Tensor
    cut: tuple[slice, ...]
    through: Callable[[torch.Tensor], torch.Tensor] | None = None
    rows: torch.Tensor | None = None

    def of(self, rows: Rows) -> tuple[slice | torch.Tensor, torch.Tensor] | None:
        """Of some rows, those that lie in it: where, and their values; None: none does."""
        if self.rows is not None:
            where = ((self.rows >= rows.first) & (self.rows < rows.first + len(rows.values))).nonzero()[:, 0]
            return where, rows.values[self.rows[where] - rows.first]
        held = range(*self.cut[0].indices(rows.total)) if self.cut else range(rows.total)
        first, last = max(rows.first, held.start), min(rows.first + len(rows.values), held.stop)
        if first >= last:
            return None
        values = rows.values[first - rows.first : last - rows.first][(slice(None), *self.cut[1:])]
        values = values if self.through is None else self.through(values)
        return slice(first - held.start, last - held.start), values.to(self.destination.dtype)


class GatheredWeights(PlannedSync):
    """Publishes a policy that ranks cut by rows (whole still, or cut already), whose rows may move in between."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice]) -> None:
        super().__init__(policy, engine)
        # Without their sources: these are the whole parameters, which are to be freed.
        self.places: dict[str, list[Place]] = {}
        for part in slices:
            self.places.setdefault(part.name, []).append(Place(part.destination, part.cut, part.through, part.rows))

    @property
    def nbytes(self) -> int:
        """Bytes that a publish writes."""
        return sum(place.destination.nbytes for places in self.places.values() for place in places)

    def describe(self) -> str:
        return (
            f"weights: gathered, {len(self.places)} parameters, {self.nbytes / 2**20:,.0f} MiB per publish (each rank "
            f"holds some rows of the policy; at most {ELEMENTS / 1e6:,.0f} M elements of all are together at once)"
        )

    def write(self) -> int:
        for _, destination, where, values in self._rows():
            destination[where] = values
        return self.nbytes

    def differing(self) -> list[str]:
        """See `WeightSync.differing`. A collective."""
        found: dict[str, bool] = {}
        for name, destination, where, values in self._rows():
            found[name] = found.get(name, False) or not torch.equal(destination[where], values)
        return [name for name, differs in found.items() if differs]

    def _rows(self) -> Iterator[tuple[str, torch.Tensor, slice | torch.Tensor, torch.Tensor]]:
        """Rows of a parameter: its name, its place, where in it they are, and their values in the engine's dtype."""
        device = next(iter(self.places.values()))[0].destination.device
        cuts = cuts_of(self._policy)
        for rows in gathered(cuts, device, lambda name: self.places[name][0].destination.dtype):
            for place in self.places[rows.name]:
                if (found := place.of(rows)) is not None:
                    yield rows.name, place.destination, *found

    def _addresses(self) -> dict[str, int]:
        return {f"engine {name}": p.data_ptr() for name, p in self.engine.tensors.parameters().items()}
