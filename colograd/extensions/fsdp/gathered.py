"""Weight sync `gathered` of an FSDP policy: a publish gathers rows of all ranks, a few at a time, into each engine.

Rows are cast to the engine's dtype before the all-gather, and are copied straight into the engine's tensors. So no
whole block of the policy is in memory in addition to the engine's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...engine.protocol import Engine
from ...weights import proof
from ...weights.mapping import Slice
from ...weights.selection import Pairing, move
from ...weights.sync import PlannedSync, bind, obstacle
from .rows import ELEMENTS, Rows, cuts_of, gathered


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is written in this rank's engine. The fields have the meaning of the fields of `Slice`."""

    destination: torch.Tensor
    cut: tuple[slice, ...]
    through: Callable[[torch.Tensor], torch.Tensor] | None = None
    rows: torch.Tensor | None = None

    def of(self, rows: Rows) -> tuple[slice | torch.Tensor, torch.Tensor] | None:
        """Return indices in ``destination`` and the values to write there, from ``rows``. None: no row belongs
        there."""
        if self.rows is not None:
            indices = ((self.rows >= rows.first) & (self.rows < rows.first + len(rows.values))).nonzero()[:, 0]
            return indices, rows.values[self.rows[indices] - rows.first]
        place_rows = range(*self.cut[0].indices(rows.total)) if self.cut else range(rows.total)
        first, last = max(rows.first, place_rows.start), min(rows.first + len(rows.values), place_rows.stop)
        if first >= last:
            return None
        values = rows.values[first - rows.first : last - rows.first][(slice(None), *self.cut[1:])]
        values = values if self.through is None else self.through(values)
        return slice(first - place_rows.start, last - place_rows.start), values.to(self.destination.dtype)


class GatheredWeights(PlannedSync):
    """Weight sync of a policy that FSDP shards by rows. The rows' memory may change between publishes."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice]) -> None:
        super().__init__(policy, engine)
        # A `Place`, unlike a `Slice`, has no reference to the whole parameter, so that its memory can be freed.
        self.places: dict[str, list[Place]] = {}
        for part in slices:
            self.places.setdefault(part.name, []).append(Place(part.destination, part.cut, part.through, part.rows))

    @property
    def nbytes(self) -> int:
        return sum(place.destination.nbytes for places in self.places.values() for place in places)

    def describe(self) -> str:
        return (
            f"weights: gathered, {len(self.places)} parameters, {self.nbytes / 2**20:,.0f} MiB per publish (each rank "
            f"has some rows of the policy; at most {ELEMENTS / 1e6:,.0f} M elements are gathered at once)"
        )

    def write(self) -> int:
        for _, destination, where, values in self._rows():
            destination[where] = values
        return self.nbytes

    def differing(self) -> list[str]:
        """Return the names of parameters that differ from the engine's weights. A collective."""
        differences: dict[str, bool] = {}
        for name, destination, where, values in self._rows():
            differences[name] = differences.get(name, False) or not torch.equal(destination[where], values)
        return [name for name, differs in differences.items() if differs]

    def _rows(self) -> Iterator[tuple[str, torch.Tensor, slice | torch.Tensor, torch.Tensor]]:
        """Yield rows of all parameters: parameter name, engine tensor, indices in the tensor, values in its dtype."""
        device = next(iter(self.places.values()))[0].destination.device
        cuts = cuts_of(self._policy)
        for rows in gathered(cuts, device, lambda name: self.places[name][0].destination.dtype):
            for place in self.places[rows.name]:
                if (part := place.of(rows)) is not None:
                    yield rows.name, place.destination, *part

    def _addresses(self) -> dict[str, int]:
        return {f"engine {name}": p.data_ptr() for name, p in self.engine.tensors.parameters().items()}


def gathered_weights(pairing: Pairing) -> GatheredWeights:
    """Create `GatheredWeights`. If possible the policy shares the engine's memory until FSDP shards the policy, so that
    the device never has two copies."""
    if not any(obstacle(part) for part in pairing.slices):
        bind(pairing.slices)
        move(pairing.policy, pairing.device)  # Parameters are in place, so only buffers move.
    proof.check_read(pairing.slices, pairing.policy, pairing.engine, tower_prompt=pairing.tower_prompt)
    return GatheredWeights(pairing.policy, pairing.engine, pairing.slices)
