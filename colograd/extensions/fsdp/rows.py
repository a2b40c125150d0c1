"""Parameters that are cut by rows, and an all-gather of their rows with a limit on memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ...parallel import watchdog
from ...parallel.gradients import in_buckets
from ...parallel.ranks import rank, world_size
from ...parallel.shards import all_gather

# Most elements that are gathered at once, unless one row per rank has more. A decoder block has more.
ELEMENTS = 2**24


class Rows(NamedTuple):
    """Consecutive rows of a parameter."""

    name: str
    first: int  # index of the first row
    values: torch.Tensor  # [rows, ...]
    total: int  # number of rows of the parameter


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter cut by rows: each rank has ``share`` rows, but the last ranks may have fewer, or none."""

    name: str
    local: torch.Tensor  # [rows of this rank, ...]
    shape: torch.Size  # of the whole parameter

    @property
    def share(self) -> int:
        """Number of rows per rank, rounded up."""
        return -(-self.shape[0] // world_size())

    @property
    def row(self) -> int:
        """Number of elements of a row."""
        return self.shape[1:].numel()

    def rows_of(self, owner: int) -> range:
        """Return the rows of a rank."""
        return range(min(owner * self.share, self.shape[0]), min((owner + 1) * self.share, self.shape[0]))

    @property
    def start(self) -> int:
        """Index of this rank's first element in the flattened parameter."""
        return self.rows_of(rank()).start * self.row


def cuts_of(model: torch.nn.Module) -> list[Cut]:
    """Return the model's parameters as this rank holds them between two steps. Tied parameters count once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an interrupted pass may have left whole weights
    cuts = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),), f"{name} isn't cut by rows"
        cuts.append(Cut(name, parameter.detach().to_local(), parameter.shape))
    return cuts


@torch.no_grad()
def gathered(
    cuts: Sequence[Cut],
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype] | None = None,
    elements: int = ELEMENTS,
) -> Iterator[Rows]:
    """Yield all rows of all parameters, on every rank. A collective. Each `Rows` is valid until the next one.

    Args:
        cuts: the parameters.
        device: the device of the collectives and of the yielded rows.
        dtype_of: returns the dtype to which a parameter of this name is cast before the exchange; None: its own.
        elements: most elements that are gathered at once.
    """
    pieces = []
    for cut in cuts:  # ranges of the rows of a rank's share, small enough that all ranks may send one at once
        step = max(1, elements // (cut.row * world_size()))
        pieces += [(cut, range(first, min(first + step, cut.share))) for first in range(0, cut.share, step)]

    def dtype(piece: tuple[Cut, range]) -> torch.dtype:
        return dtype_of(piece[0].name) if dtype_of else piece[0].local.dtype

    for sent_dtype, group in itertools.groupby(pieces, key=dtype):
        for bucket in in_buckets(group, elements // world_size(), lambda piece: piece[0].row * len(piece[1])):
            yield from _exchange(bucket, sent_dtype, device)


def _exchange(bucket: Sequence[tuple[Cut, range]], dtype: torch.dtype, device: torch.device) -> Iterator[Rows]:
    sizes = [cut.row * len(rows) for cut, rows in bucket]
    sent = torch.empty(sum(sizes), dtype=dtype, device=device)
    for (cut, rows), room in zip(bucket, sent.split(sizes), strict=True):
        values = cut.local[rows.start : rows.stop].reshape(-1)
        room[: values.numel()].copy_(values)
    received = torch.empty(world_size() * len(sent), dtype=dtype, device=device)
    all_gather(received, sent)
    watchdog.progress()
    for owner, part in enumerate(received.split(len(sent))):
        for (cut, rows), values in zip(bucket, part.split(sizes), strict=True):
            actual = cut.rows_of(owner)[rows.start : rows.stop]  # without padding
            if actual:
                shape = (len(actual), *cut.shape[1:])
                yield Rows(cut.name, actual.start, values[: cut.row * len(actual)].view(shape), cut.shape[0])
