"""`gathered`: each rank holds some rows of the policy; a publish brings all of them, a few at a time, into each engine.

The rows go from the exchange between ranks straight to their places in the engine's tensors, already cast: no block of
the policy is ever whole beside the engine. All ranks publish at the same time, in the same exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..engine.vllm_engine import Engine
from ..sharding.rows import ELEMENTS, cuts_of, gathered
from .mapping import Slice
from .way import PlannedWay


class GatheredWeights(PlannedWay):
    """Publishes a policy that ranks have cut by rows.

    Args:
        policy: whole still, or cut already. It is asked for its rows at each publish, so they may move.
        engine: ``slices`` pairs the policy's parameters with its tensors.
    """

    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice]) -> None:
        super().__init__(policy, engine)
        # Not the slices: their sources are the whole parameters, which are to be freed.
        self.places = {part.name: part.destination for part in slices}

    @property
    def nbytes(self) -> int:
        """Bytes that a publish writes."""
        return sum(place.nbytes for place in self.places.values())

    def describe(self) -> str:
        return (
            f"weights: gathered, {len(self.places)} parameters, {self.nbytes / 2**20:,.0f} MiB per publish (each rank "
            f"holds some rows of the policy; at most {ELEMENTS / 1e6:,.0f} M elements of all are together at once)"
        )

    def write(self) -> int:
        """A collective."""
        for place, values in self._rows():
            place.copy_(values)
        return self.nbytes

    def differing(self) -> list[str]:
        """See `Publisher.differing`. A collective."""
        found: dict[str, bool] = {}
        for name, place, values in self._named_rows():
            found[name] = found.get(name, False) or not torch.equal(place, values)
        return [name for name, differs in found.items() if differs]

    def _rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((place, values) for _, place, values in self._named_rows())

    def _named_rows(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Rows of a parameter: its name, their place in the engine, and their values, cast to the engine's dtype."""
        device = next(iter(self.places.values())).device
        for name, first, values in gathered(cuts_of(self._policy), device, lambda name: self.places[name].dtype):
            yield name, self.places[name][first : first + len(values)], values

    def _addresses(self) -> dict[str, int]:
        """Of the engine's tensors alone."""
        return {f"engine {name}": p.data_ptr() for name, p in self.engine.model.named_parameters()}
