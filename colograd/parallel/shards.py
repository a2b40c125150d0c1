"""Parts of tensors that an engine's ranks hold (`Shard`), and the groups of ranks that exchange them (`RankGroup`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .layout import RankLayout
from .ranks import time_limit

T = TypeVar("T")
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has a new name
Box = tuple[tuple[int, int], ...]  # of each dimension the first element and the last + 1


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor: boxes of it, one behind the other along ``axis``.

    A gate and an up projection of a mixture's experts are halves of one tensor, of each of which a rank has a part: two
    boxes. All else is one box.
    """

    shape: tuple[int, ...]  # of the whole tensor
    boxes: tuple[Box, ...]
    axis: int = 0

    @classmethod
    def of_cuts(cls, shape: Sequence[int], cuts: Iterable[tuple[slice, ...]]) -> Shard:
        """The part that index expressions select."""
        boxes = []
        for cut in cuts:
            ranges = [one.indices(size)[:2] for one, size in zip(cut, shape, strict=False)]
            boxes.append((*ranges, *((0, size) for size in shape[len(cut) :])))
        first, *others = boxes
        differs = {axis for box in others for axis, (a, b) in enumerate(zip(first, box, strict=True)) if a != b}
        assert len(differs) <= 1, boxes
        return cls(tuple(shape), tuple(boxes), differs.pop() if differs else 0)

    @classmethod
    def from_json(cls, given: Sequence[Any]) -> Shard:
        shape, boxes, axis = given
        return cls(tuple(shape), tuple(tuple((a, b) for a, b in box) for box in boxes), axis)

    def as_json(self) -> list[Any]:
        return [self.shape, self.boxes, self.axis]

    @property
    def sizes(self) -> list[int]:
        """Of each box along the axis."""
        return [box[self.axis][1] - box[self.axis][0] for box in self.boxes] if self.shape else [1]

    @property
    def local_shape(self) -> tuple[int, ...]:
        sizes = [stop - start for start, stop in self.boxes[0]]
        if sizes:
            sizes[self.axis] = sum(self.sizes)
        return tuple(sizes)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def begin(self) -> int | None:
        """Where the part begins in the flattened tensor; None: it isn't one range of it."""
        rows, *others = self.boxes[0] or ((0, 1),)
        if len(self.boxes) > 1 or any(stop - start != size for (start, stop), size in zip(others, self.shape[1:])):  # noqa: B905
            return None
        return rows[0] * math.prod(self.shape[1:])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the whole shape: a view of it, unless there are several boxes."""
        parts = [whole[tuple(slice(*ends) for ends in box)] for box in self.boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    def write(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the part into its place in a tensor of the whole shape."""
        parts = local.split(self.sizes, self.axis) if local.dim() else [local]
        for box, part in zip(self.boxes, parts, strict=True):
            whole[tuple(slice(*ends) for ends in box)].copy_(part)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks that exchange tensors. A deep copy of a model has the same ones."""

    ranks: tuple[int, ...]
    place: int  # of this rank among them
    group: Any
    on_host: Any = None  # the same ranks over gloo, where they are to meet
    exchanged: list[int] = field(default_factory=lambda: [0], compare=False)  # exchanges on the device so far

    def __deepcopy__(self, memo: Any) -> RankGroup:
        return self

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        return self._reduce_(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce_(tensor, dist.ReduceOp.MAX)

    def _reduce_(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, operation, group=self.group)
            self.exchanged[0] += 1
        return tensor

    def meets(self, seconds: float) -> bool:
        """Whether all of them come here within so many seconds, after as many exchanges: NCCL's are queued, and one
        that is left would pair with others' next."""
        counted = torch.tensor([self.exchanged[0], -self.exchanged[0]])
        try:
            if self.size > 1:
                work = dist.all_reduce(counted, dist.ReduceOp.MAX, group=self.on_host, async_op=True)
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return False
        most, least = counted.tolist()
        return most == -least

    def gather(self, value: T) -> tuple[T, ...]:
        """Every one's ``value`` (any picklable object), through host memory; of ranks that can meet."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self.on_host)
        return tuple(values)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every one's (n, ...), one behind the other: (size * n, ...)."""
        found = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        all_gather(found, tensor.contiguous(), group=self.group)
        self.exchanged[0] += 1
        return found

    def all_to_all(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Give each rank so many of the tensor's rows, in the order of ranks; returns the rows that each has given."""
        found = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(found, tensor.contiguous(), [*received], [*sent], group=self.group)
        self.exchanged[0] += 1
        return found

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of the rank at place ``source``, into all the others'."""
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[source], group=self.group)
        return tensor


def group_of(
    layout: RankLayout, ranks_of: Callable[[RankLayout], Sequence[int]], meets: bool = False, exchanges: bool = True
) -> RankGroup:
    """This rank's group, if ``ranks_of`` says of a rank which ranks are in its group. A collective: every rank makes
    every group, in the same order.

    Args:
        meets: the ranks will ask whether they meet.
        exchanges: on their devices, too; if not, they have the host's group alone.
    """
    world = range(layout.world_size)
    every = [dataclasses.replace(layout, rank=rank) for rank in world]
    groups = dict.fromkeys(tuple(ranks_of(each)) for each in every)
    made = {ranks: dist.new_group([*ranks], time_limit()) for ranks in groups if exchanges}
    hosts = {ranks: dist.new_group([*ranks], time_limit(), backend="gloo") for ranks in groups if meets}
    mine = tuple(ranks_of(layout))
    return RankGroup(mine, mine.index(layout.rank), (made if exchanges else hosts)[mine], hosts.get(mine))
