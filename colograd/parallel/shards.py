"""Parts of tensors (`Shard`), groups of ranks that exchange tensors (`RankGroup`), and sums of gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import watchdog
from .layout import RankLayout
from .ranks import time_limit

T = TypeVar("T")
# torch 2.13 renames `all_gather_into_tensor` to `all_gather_single`
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BUCKET = 64 * 2**20  # maximum bytes of gradients that are summed in one collective; a larger one is summed alone
Box = tuple[tuple[int, int], ...]  # per dimension of a tensor: (first index, last index + 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor: one box (a range of indices per dimension), or several boxes joined along ``axis``.

    For example, a part of MoE experts' stacked gate and up projections has a box in each of the two projections."""

    shape: tuple[int, ...]  # shape of the whole tensor
    boxes: tuple[Box, ...]
    axis: int = 0

    @classmethod
    def of_cuts(cls, shape: Sequence[int], cuts: Iterable[tuple[slice, ...]]) -> Shard:
        boxes = []
        for cut in cuts:
            ranges = [index.indices(size)[:2] for index, size in zip(cut, shape, strict=False)]
            boxes.append((*ranges, *((0, size) for size in shape[len(cut) :])))
        first, *others = boxes
        differs = {axis for box in others for axis, (a, b) in enumerate(zip(first, box, strict=True)) if a != b}
        assert len(differs) <= 1, boxes
        return cls(tuple(shape), tuple(boxes), differs.pop() if differs else 0)

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Shard:
        shape, boxes, axis = value
        return cls(tuple(shape), tuple(tuple((a, b) for a, b in box) for box in boxes), axis)

    def as_json(self) -> list[Any]:
        return [self.shape, self.boxes, self.axis]

    @property
    def sizes(self) -> list[int]:
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
        """Offset of the part in the flattened whole tensor, or None if the part isn't contiguous in that tensor."""
        rows, *others = self.boxes[0] or ((0, 1),)
        if len(self.boxes) > 1 or any(stop - start != size for (start, stop), size in zip(others, self.shape[1:])):  # noqa: B905
            return None
        return rows[0] * math.prod(self.shape[1:])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tensor ``whole``: a view if the part is one box, a copy if it has several."""
        parts = [whole[tuple(slice(*ends) for ends in box)] for box in self.boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    def write(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        parts = local.split(self.sizes, self.axis) if local.dim() else [local]
        for box, part in zip(self.boxes, parts, strict=True):
            whole[tuple(slice(*ends) for ends in box)].copy_(part)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks that exchange tensors. Deep copies of a model share one `RankGroup`."""

    ranks: tuple[int, ...]
    place: int  # Index of this rank in `ranks`.
    group: Any
    on_host: Any = None  # Gloo process group of `ranks`, which `meets` and `gather` use.
    # Number of all-reduces and all-to-alls so far, which `meets` compares. Groups may share this list.
    exchanged: list[int] = field(default_factory=lambda: [0], compare=False)

    def __deepcopy__(self, memo: Any) -> RankGroup:
        return self

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce_(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce_(tensor, dist.ReduceOp.MAX)

    def _reduce_(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, operation, group=self.group)
            self.exchanged[0] += 1
        return tensor

    def meets(self, seconds: float) -> bool:
        """Return whether all ranks call `meets` within ``seconds``, with equal numbers of all-reduces and all-to-alls.

        If the numbers differ, NCCL would pair collectives that don't belong together."""
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
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self.on_host)
        return tuple(values)

    def all_to_all(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send ``sent[i]`` rows of a tensor ``(sum(sent), ...)`` to the group's i-th rank. Return the rows
        ``(sum(received), ...)``, with ``received[i]`` rows from the i-th rank."""
        rows = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(rows, tensor.contiguous(), [*received], [*sent], group=self.group)
        self.exchanged[0] += 1
        return rows

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[source], group=self.group)
        return tensor


def group_of(
    layout: RankLayout, ranks_of: Callable[[RankLayout], Sequence[int]], meets: bool = False, exchanges: bool = True
) -> RankGroup:
    """Return the group of the ranks ``ranks_of(layout)``, which include this rank. A collective.

    ``ranks_of`` is also called with the other ranks' layouts, to make their groups. ``meets``: create a gloo group for
    the methods `meets` and `gather`. ``exchanges``: create a group of the default backend for tensors. Without
    ``exchanges``, set ``meets``: tensors then use the gloo group."""
    world = range(layout.world_size)
    layouts = [dataclasses.replace(layout, rank=rank) for rank in world]
    groups = dict.fromkeys(tuple(ranks_of(each)) for each in layouts)
    on_device = {ranks: dist.new_group([*ranks], time_limit()) for ranks in groups if exchanges}
    on_host = {ranks: dist.new_group([*ranks], time_limit(), backend="gloo") for ranks in groups if meets}
    ranks = tuple(ranks_of(layout))
    return RankGroup(ranks, ranks.index(layout.rank), (on_device if exchanges else on_host)[ranks], on_host.get(ranks))


class Lockstep:
    """Messages from the first rank of a vLLM engine to the engine's other ranks, which repeat the first rank's calls.

    Only the first rank decides on calls, because clocks and users' functions may differ between ranks."""

    def __init__(self, layout: RankLayout) -> None:
        self.leads = layout.engine_place == 0
        # Gloo, because NCCL would send Python objects through the GPUs.
        self._engine = group_of(layout, lambda each: each.engine_group, meets=True, exchanges=False)

    def tell(self, message: Any) -> None:
        dist.broadcast_object_list([message], self._engine.ranks[0], self._engine.group)

    def listen(self) -> Any:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, self._engine.ranks[0], self._engine.group)
        watchdog.progress("a step of the engine")
        return message[0]


def parts_of(model: Any) -> Any:
    """Return a tensor-parallel model's ``tensor_parts``, or None for other models.

    ``tensor_parts`` has the attributes ``engine`` (`RankGroup` of the engine's ranks), ``shards`` (parameter name ->
    this rank's `Shard`) and ``elements`` (number of elements of the whole model)."""
    return getattr(model, "tensor_parts", None)


def sum_over_ranks(
    gradients: Sequence[torch.Tensor], device: torch.device | None = None, bucket_bytes: int = BUCKET,
    among: RankGroup | None = None,
) -> int:  # fmt: skip
    """Sum each tensor in place over the ranks ``among`` (None: all ranks), and return the summed bytes.

    DistributedDataParallel isn't used, because it rejects float32 gradients of bfloat16 parameters."""
    nbytes = 0
    by_dtype = itertools.groupby(gradients, key=lambda gradient: gradient.dtype)
    for bucket in (bucket for _, part in by_dtype for bucket in in_buckets(part, bucket_bytes, lambda g: g.nbytes)):
        alone = len(bucket) == 1 and bucket[0].is_contiguous()  # reduced in place, because a copy may take gigabytes
        parts = [gradient.reshape(-1).to(device or gradient.device) for gradient in bucket]
        flat = parts[0] if alone else torch.cat(parts)
        if among is None:
            dist.all_reduce(flat)
        else:
            among.sum_(flat)
        watchdog.progress()
        nbytes += flat.nbytes
        if alone and flat.device == bucket[0].device:
            continue
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return nbytes


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return dtype


def zero_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Set missing gradients of trained parameters to zeros. Optimizers skip parameters without a gradient."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def in_buckets(items: Iterable[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items, each of total size at most ``limit``. A larger item gets its own list."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        if bucket and filled + size(item) > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size(item)
    if bucket:
        yield bucket
