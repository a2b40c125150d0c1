"""Buckets: groups of parameters that ranks exchange in one collective. Each of N ranks updates an N-th of a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..parallel import watchdog
from ..parallel.gradients import in_buckets
from ..parallel.shards import all_gather
from .strategy import Owned

# ELEMENTS: maximum elements of a bucket, except for a larger single parameter. 64 MiB of float32 keep a link busy.
ELEMENTS = 2**24

# torch 2.13 has renamed reduce_scatter_tensor to reduce_scatter_single.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Bucket:
    """A group of parameters that are exchanged as one flat tensor, padded to one equal part per rank.

    This rank updates one part. The flat tensor exists only during an exchange. If the bucket has one parameter, and the
    number of ranks divides its size, the parameter's memory is the flat tensor.

    Args:
        group: process group of the ranks. None means all ranks.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], rank: int, ranks: int, group: Any = None
    ) -> None:
        self.parameters, self.ranks, self.group = parameters, ranks, group
        # The flat tensor concatenates the parameters. ``starts`` are their offsets. ``part`` is the number of elements
        # per rank, with padding. ``begin`` is the offset of this rank's part. ``in_place`` means that a parameter's
        # memory is the flat tensor. ``sum`` [part] is this rank's part of the summed gradient. ``places`` maps pieces
        # of parameters to ranges of this rank's part.
        self.sizes = [parameter.numel() for parameter in parameters]
        self.starts = list(itertools.accumulate(self.sizes, initial=0))[:-1]
        self.part = -(-sum(self.sizes) // ranks)
        self.begin = rank * self.part
        self.in_place = len(parameters) == 1 and self.sizes[0] == self.part * ranks
        self.sum: torch.Tensor | None = None
        self.places: dict[Owned, slice] = {}
        for name, parameter, start in zip(names, parameters, self.starts, strict=True):
            first = min(max(self.begin - start, 0), parameter.numel())
            last = min(max(self.begin + self.part - start, 0), parameter.numel())
            if first < last:
                piece = torch.nn.Parameter(parameter.data.view(-1)[first:last])
                if self.gradient_dtype != piece.dtype:
                    piece.grad_dtype = self.gradient_dtype
                begin = start + first - self.begin
                self.places[Owned(name, piece, first, last)] = slice(begin, begin + last - first)

    @property
    def gradient_dtype(self) -> torch.dtype:
        first = self.parameters[0]
        return getattr(first, "grad_dtype", None) or first.dtype

    def flat(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Concatenate one tensor per parameter into ``[part * ranks]``. None and padding become zeros."""
        if self.in_place and tensors[0] is not None and tensors[0].is_contiguous():
            return tensors[0].view(-1).to(self.parameters[0].device)
        flat = torch.zeros(self.part * self.ranks, dtype=dtype, device=self.parameters[0].device)
        for tensor, start, size in zip(tensors, self.starts, self.sizes, strict=True):
            if tensor is not None:
                flat[start : start + size].copy_(tensor.reshape(-1))
        return flat

    def add(self, summed: torch.Tensor) -> None:
        """Add ``summed`` [part], a gradient summed over ranks, to this rank's gradient that the optimizer reads."""
        self.sum = summed if self.sum is None else self.sum.add_(summed)
        for piece, place in self.places.items():
            piece.part.grad = self.sum[place]

    def discard(self) -> None:
        self.sum = None
        for piece in self.places:
            piece.part.grad = None

    @torch.no_grad()
    def gather(self) -> int:
        """Write all ranks' updated weights into the parameters by an all-gather. Return the collective's bytes."""
        flat = self.flat([parameter.data for parameter in self.parameters], self.parameters[0].dtype)
        all_gather(flat, flat[self.begin : self.begin + self.part], group=self.group)
        watchdog.progress()
        if not self.in_place:
            for parameter, start, size in zip(self.parameters, self.starts, self.sizes, strict=True):
                parameter.data.copy_(flat[start : start + size].view_as(parameter))
        return flat.nbytes


def buckets_of(
    model: torch.nn.Module, rank: int, ranks: int, elements: int = ELEMENTS, group: Any = None
) -> list[Bucket]:
    """Return the trained parameters in buckets of one dtype and of at most ``elements`` elements, in about the order of
    their gradients in a backward. ``group`` is the process group of the ranks; None means all ranks."""
    trained = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    buckets = []
    for _, same_kind in itertools.groupby(trained, key=lambda item: (item[1].dtype, item[1].device)):
        for members in in_buckets(same_kind, elements, lambda item: item[1].numel()):
            names, parameters = zip(*members, strict=True)
            buckets.append(Bucket(names, parameters, rank, ranks, group))
    return buckets
