"""Buckets: consecutive parameters that ranks exchange in one collective. Each of N ranks owns an N-th of a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..parallel import watchdog
from ..parallel.gradients import in_buckets
from ..parallel.shards import all_gather
from .strategy import Owned

# Most elements of a bucket; a larger parameter has its own bucket. 64 MiB of float32 gradients keep a link busy.
ELEMENTS = 2**24

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13's new name


@dataclass(eq=False, slots=True)
class Bucket:
    """Parameters as one flat tensor, padded to N equal parts. This rank owns one part.

    The flat tensor exists only during an exchange. If the bucket is a single parameter with a size that N divides, the
    flat tensor is that parameter's memory.
    """

    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    rank: int
    ranks: int
    group: Any = None  # process group of these ranks; None: all ranks
    sum: torch.Tensor | None = None  # [part] this rank's part of the summed gradient
    owned: list[Owned] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, parameter, start in zip(self.names, self.parameters, self.starts, strict=True):
            first = min(max(self.begin - start, 0), parameter.numel())
            last = min(max(self.begin + self.part - start, 0), parameter.numel())
            if first < last:
                piece = torch.nn.Parameter(parameter.data.view(-1)[first:last])
                if self.gradient_dtype != piece.dtype:
                    piece.grad_dtype = self.gradient_dtype
                self.owned.append(Owned(name, piece, first, last))

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    @property
    def starts(self) -> list[int]:
        """Index of each parameter's first element in the flat tensor."""
        return list(itertools.accumulate(self.sizes, initial=0))[:-1]

    @property
    def part(self) -> int:
        """Number of elements of each rank's part. The last part ends with padding."""
        return -(-sum(self.sizes) // self.ranks)

    @property
    def begin(self) -> int:
        """Index of the first element of this rank's part in the flat tensor."""
        return self.rank * self.part

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype of the bucket's gradients and their sum."""
        first = self.parameters[0]
        return getattr(first, "grad_dtype", None) or first.dtype

    @property
    def in_place(self) -> bool:
        """Whether the flat tensor is the memory of the bucket's only parameter."""
        return len(self.parameters) == 1 and self.sizes[0] == self.part * self.ranks

    def flat(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Concatenate one tensor per parameter, with zeros in place of None and as padding: ``[part * ranks]``."""
        if self.in_place and tensors[0] is not None and tensors[0].is_contiguous():
            return tensors[0].view(-1).to(self.parameters[0].device)
        flat = torch.zeros(self.part * self.ranks, dtype=dtype, device=self.parameters[0].device)
        for tensor, start, size in zip(tensors, self.starts, self.sizes, strict=True):
            if tensor is not None:
                flat[start : start + size].copy_(tensor.reshape(-1))
        return flat

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> Reduction:
        """Begin to sum gradients, one per parameter and on any device, over ranks. None counts as zeros."""
        flat = self.flat(gradients, self.gradient_dtype)
        summed = torch.empty(self.part, dtype=flat.dtype, device=flat.device)
        return Reduction(self, flat, summed, reduce_scatter(summed, flat, async_op=True, group=self.group))

    def add(self, summed: torch.Tensor) -> None:
        """Add a reduction's result ``[part]`` to this rank's part of the step's gradient, which the optimizer reads."""
        self.sum = summed if self.sum is None else self.sum.add_(summed)
        for piece in self.owned:
            piece.part.grad = self.sum[self.place_of(piece)]

    def place_of(self, piece: Owned) -> slice:
        """Return the range of a piece within this rank's part."""
        first = self.starts[self.names.index(piece.name)] + piece.start - self.begin
        return slice(first, first + piece.stop - piece.start)

    def discard(self) -> None:
        """Drop the summed gradient."""
        self.sum = None
        for piece in self.owned:
            piece.part.grad = None

    @torch.no_grad()
    def gather(self) -> int:
        """Gather all ranks' parts of the weights into the parameters, in place. Return the bytes of the collective."""
        flat = self.flat([parameter.data for parameter in self.parameters], self.parameters[0].dtype)
        all_gather(flat, flat[self.begin : self.begin + self.part], group=self.group)
        watchdog.progress()
        if not self.in_place:
            for parameter, start, size in zip(self.parameters, self.starts, self.sizes, strict=True):
                parameter.data.copy_(flat[start : start + size].view_as(parameter))
        return flat.nbytes


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum over ranks that is under way."""

    bucket: Bucket
    flat: torch.Tensor  # the input; must exist until the collective has ended
    summed: torch.Tensor  # the output, [part]
    work: dist.Work

    def finish(self, keep: Callable[[Bucket, torch.Tensor], None]) -> int:
        """Wait for the sum and pass this rank's part to ``keep``. Return the bytes of the collective."""
        watchdog.finish(self.work)
        keep(self.bucket, self.summed)
        return self.flat.nbytes


def buckets_of(
    model: torch.nn.Module, rank: int, ranks: int, elements: int = ELEMENTS, group: Any = None
) -> list[Bucket]:
    """Return the trained parameters in buckets of one dtype, in about the order of their gradients in a backward.

    Args:
        model: the model.
        rank: index of this rank among ``ranks``.
        ranks: number of parts of a bucket.
        elements: most elements of a bucket.
        group: process group of the ranks; None: all ranks.
    """
    trained = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    buckets = []
    for _, same_kind in itertools.groupby(trained, key=lambda item: (item[1].dtype, item[1].device)):
        for members in in_buckets(same_kind, elements, lambda item: item[1].numel()):
            names, parameters = zip(*members, strict=True)
            buckets.append(Bucket(names, parameters, rank, ranks, group))
    return buckets
