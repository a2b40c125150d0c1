"""Parameters that are cut by rows, and how their rows come together again: a bounded number of them at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ..parallel import watchdog
from ..parallel.gradients import in_buckets
from ..parallel.ranks import rank, world_size
from ..parallel.shards import all_gather

# Elements that are whole at once; a row of all ranks that is larger is by itself. A decoder block has more.
ELEMENTS = 2**24


class Rows(NamedTuple):
    """Some rows of a parameter, whole: its elements ``[first, first + len(values)]`` of the first dimension."""

    name: str
    first: int
    values: torch.Tensor
    total: int  # rows of the parameter


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter of which each rank has ``share`` rows; the last ranks may have fewer, or none."""

    name: str
    local: torch.Tensor  # [own rows, ...]
    shape: torch.Size

    @property
    def share(self) -> int:
        return -(-self.shape[0] // world_size())

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.shape[1:].numel()

    def rows_of(self, owner: int) -> range:
        return range(min(owner * self.share, self.shape[0]), min((owner + 1) * self.share, self.shape[0]))

    @property
    def start(self) -> int:
        """Of this rank's part in the flattened parameter."""
        return self.rows_of(rank()).start * self.row


def cuts_of(model: torch.nn.Module) -> list[Cut]:
    """The model's parameters, as this rank holds them between two steps. Tied ones are one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what an interrupted pass left whole
    return [_cut(name, parameter) for name, parameter in model.named_parameters()]


def _cut(name: str, parameter: torch.Tensor) -> Cut:
    assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),), f"{name} isn't cut by rows"
    return Cut(name, parameter.detach().to_local(), parameter.shape)


@torch.no_grad()
def gathered(
    cuts: Sequence[Cut],
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype] | None = None,
    elements: int = ELEMENTS,
) -> Iterator[Rows]:
    """All rows of all parameters, on every rank's ``device``, so many ``elements`` at a time. A collective; each `Rows`
    holds until the next is asked for. ``dtype_of`` says by a parameter's name what it is cast to before it is sent."""
    pieces = ((cut, rows) for cut in cuts for rows in _few(cut, elements))

    def dtype(piece: tuple[Cut, range]) -> torch.dtype:
        return dtype_of(piece[0].name) if dtype_of else piece[0].local.dtype

    for sent_as, alike in itertools.groupby(pieces, key=dtype):
        for bucket in in_buckets(alike, elements // world_size(), lambda piece: piece[0].row * len(piece[1])):
            yield from _exchange(bucket, sent_as, device)


def _few(cut: Cut, elements: int) -> Iterator[range]:
    """The rows of a rank's share, counted from its first, so many at a time as all ranks may send at once."""
    step = max(1, elements // (cut.row * world_size()))
    return (range(first, min(first + step, cut.share)) for first in range(0, cut.share, step))


def _exchange(bucket: Sequence[tuple[Cut, range]], dtype: torch.dtype, device: torch.device) -> Iterator[Rows]:
    sizes = [cut.row * len(rows) for cut, rows in bucket]
    sent = torch.empty(sum(sizes), dtype=dtype, device=device)
    for (cut, rows), room in zip(bucket, sent.split(sizes), strict=True):
        own = cut.local[rows.start : rows.stop].reshape(-1)
        room[: own.numel()].copy_(own)
    received = torch.empty(world_size() * len(sent), dtype=dtype, device=device)
    all_gather(received, sent)
    watchdog.progress()
    for owner, part in enumerate(received.split(len(sent))):
        for (cut, rows), values in zip(bucket, part.split(sizes), strict=True):
            owned = cut.rows_of(owner)[rows.start : rows.stop]
            if owned:
                shape = (len(owned), *cut.shape[1:])
                yield Rows(cut.name, owned.start, values[: cut.row * len(owned)].view(shape), cut.shape[0])
