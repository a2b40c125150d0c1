"""Weight sync `gathered` of an FSDP policy: a publish gathers rows of all ranks, a few at a time, into each engine.

Rows are cast to the engine's dtype before the all-gather, and are copied straight into the engine's tensors. So no
whole block of the policy is in memory in addition to the engine's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ...engine.protocol import Engine
from ...weights import proof, shared
from ...weights.mapping import Slice
from ...weights.selection import Pairing, move
from ...weights.sync import PlannedSync
from .rows import ELEMENTS, Rows, cuts_of, gathered


def place_of(part: Slice, rows: Rows) -> tuple[slice | torch.Tensor, torch.Tensor] | None:
    """Return indices in a slice's ``destination`` and the values to write there, from ``rows``. None: no row belongs
    there."""
    if part.rows is not None:
        indices = ((part.rows >= rows.first) & (part.rows < rows.first + len(rows.values))).nonzero()[:, 0]
        return indices, rows.values[part.rows[indices] - rows.first]
    place_rows = range(*part.cut[0].indices(rows.total)) if part.cut else range(rows.total)
    first, last = max(rows.first, place_rows.start), min(rows.first + len(rows.values), place_rows.stop)
    if first >= last:
        return None
    values = rows.values[first - rows.first : last - rows.first][(slice(None), *part.cut[1:])]
    values = values if part.through is None else part.through(values)
    return slice(first - place_rows.start, last - place_rows.start), values.to(part.destination.dtype)


class GatheredWeights(PlannedSync):
    """Weight sync of a policy that FSDP shards by rows. The rows' memory may change between publishes."""

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice]) -> None:
        super().__init__(policy, engine)
        self.places: dict[str, list[Slice]] = {}
        for part in slices:  # Without references to the whole parameters, so that their memory can be freed.
            place = dataclasses.replace(part, source=part.source.new_empty(0), packed=None, adapted=None)
            self.places.setdefault(part.name, []).append(place)

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
                if (part := place_of(place, rows)) is not None:
                    yield rows.name, place.destination, *part

    def _addresses(self) -> dict[str, int]:
        return {f"engine {name}": p.data_ptr() for name, p in self.engine.tensors.parameters().items()}


def gathered_weights(pairing: Pairing) -> GatheredWeights:
    """Create `GatheredWeights`. If possible the policy shares the engine's memory until FSDP shards the policy, so that
    the device never has two copies."""
    if not any(shared.obstacle(part) for part in pairing.slices):
        shared.bind(pairing.slices)
        move(pairing.policy, pairing.device)  # Parameters are in place, so only buffers move.
    proof.check_read(pairing.slices, pairing.policy, pairing.engine, tower_prompt=pairing.tower_prompt)
    return GatheredWeights(pairing.policy, pairing.engine, pairing.slices)
