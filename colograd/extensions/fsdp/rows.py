"""Parameters that FSDP2 shards by rows, and weight sync `gathered`, which gathers a few rows of all ranks at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ...engine.protocol import Engine
from ...parallel import watchdog
from ...parallel.ranks import world_size
from ...parallel.shards import all_gather, in_buckets
from ...weights import proof
from ...weights.mapping import Slice
from ...weights.selection import Pairing, move
from ...weights.sync import PlannedSync, bind, obstacle

ELEMENTS = 2**24


class Rows(NamedTuple):
    name: str
    first: int
    values: torch.Tensor  # [rows, ...]
    total: int  # number of rows of the whole parameter


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter that FSDP shards by rows. Each rank has ``share`` rows, except that the last ranks may have fewer."""

    name: str
    local: torch.Tensor  # This rank's rows, [rows, ...].
    shape: torch.Size  # Shape of the whole parameter.

    @property
    def share(self) -> int:
        """Rows per rank, rounded up."""
        return -(-self.shape[0] // world_size())

    @property
    def row(self) -> int:
        return self.shape[1:].numel()

    def rows_of(self, owner: int) -> range:
        return range(min(owner * self.share, self.shape[0]), min((owner + 1) * self.share, self.shape[0]))


def cuts_of(model: torch.nn.Module) -> list[Cut]:
    """Free the gathered whole weights of a sharded model. Return a `Cut` per parameter, one for tied parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # An interrupted forward may leave gathered whole weights.
    cuts = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),), f"{name} isn't cut by rows"
        cuts.append(Cut(name, parameter.detach().to_local(), parameter.shape))
    return cuts


@torch.no_grad()
def gathered(
    cuts: Sequence[Cut], device: torch.device, dtype_of: Callable[[str], torch.dtype] | None = None,
    elements: int = ELEMENTS,
) -> Iterator[Rows]:  # fmt: skip
    """Yield all rows of all parameters, a few rows at a time, on every rank. A collective."""
    pieces = []
    for cut in cuts:  # Cut the rows so that an equal range of every rank fits into one all-gather.
        step = max(1, elements // (cut.row * world_size()))
        pieces += [(cut, range(first, min(first + step, cut.share))) for first in range(0, cut.share, step)]

    dtype = dtype_of or {cut.name: cut.local.dtype for cut in cuts}.__getitem__
    for sent_dtype, group in itertools.groupby(pieces, key=lambda piece: dtype(piece[0].name)):
        for bucket in in_buckets(group, elements // world_size(), lambda piece: piece[0].row * len(piece[1])):
            sizes = [cut.row * len(rows) for cut, rows in bucket]
            sent = torch.empty(sum(sizes), dtype=sent_dtype, device=device)
            for (cut, rows), room in zip(bucket, sent.split(sizes), strict=True):
                values = cut.local[rows.start : rows.stop].reshape(-1)
                room[: values.numel()].copy_(values)
            received = torch.empty(world_size() * len(sent), dtype=sent_dtype, device=device)
            all_gather(received, sent)
            watchdog.progress()
            for owner, part in enumerate(received.split(len(sent))):
                for (cut, rows), values in zip(bucket, part.split(sizes), strict=True):
                    actual = cut.rows_of(owner)[rows.start : rows.stop]  # the owner's rows, without padding
                    if actual:
                        shape = (len(actual), *cut.shape[1:])
                        yield Rows(cut.name, actual.start, values[: cut.row * len(actual)].view(shape), cut.shape[0])


def place_of(part: Slice, rows: Rows) -> tuple[slice | torch.Tensor, torch.Tensor] | None:
    """Return the indices in ``part.destination`` that ``rows`` update, and the new values. None: nothing to update."""
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
    def __init__(self, policy: torch.nn.Module, engine: Engine, slices: Sequence[Slice]) -> None:
        super().__init__(policy, engine)
        self.places: dict[str, list[Slice]] = {}
        for part in slices:  # Keep no references to the whole parameters, so that their memory is freed.
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
        rows = self._rows()
        return [*dict.fromkeys(name for name, to, where, values in rows if not torch.equal(to[where], values))]

    def _rows(self) -> Iterator[tuple[str, torch.Tensor, slice | torch.Tensor, torch.Tensor]]:
        """Yield parameter name, engine tensor, indices in the engine tensor, and the new values there. A collective."""
        device = next(iter(self.places.values()))[0].destination.device
        cuts = cuts_of(self._policy)
        for rows in gathered(cuts, device, lambda name: self.places[name][0].destination.dtype):
            for place in self.places[rows.name]:
                if (part := place_of(place, rows)) is not None:
                    yield rows.name, place.destination, *part

    def _addresses(self) -> dict[str, int]:
        return {f"engine {name}": p.data_ptr() for name, p in self.engine.tensors.parameters().items()}


def gathered_weights(pairing: Pairing) -> GatheredWeights:
    """Return weight sync `gathered`. If possible, first move the policy's parameters into the engine's tensors.

    Then the device needs no memory for a second copy of the weights before FSDP shards the policy."""
    if not any(obstacle(part) for part in pairing.slices):
        bind(pairing.slices)
        move(pairing.policy, pairing.device)  # the policy's parameters are on the device already, so only buffers move
    proof.check_read(pairing.slices, pairing.policy, pairing.engine, tower_prompt=pairing.tower_prompt)
    return GatheredWeights(pairing.policy, pairing.engine, pairing.slices)
