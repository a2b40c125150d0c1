"""Sum gradients over ranks once per optimizer step, several tensors in one collective. (DistributedDataParallel rejects
float32 gradients of bfloat16 parameters, and would sum after each micro-batch.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from . import watchdog
from .shards import RankGroup

T = TypeVar("T")

BUCKET = 64 * 2**20  # maximum bytes of several gradients that are summed in one collective


def sum_over_ranks(
    gradients: Sequence[torch.Tensor], device: torch.device | None = None, bucket_bytes: int = BUCKET,
    among: RankGroup | None = None,
) -> int:  # fmt: skip
    """Sum tensors in place over the ranks in ``among`` (None means all ranks). Return the number of bytes summed.

    The tensors must have equal order on all ranks. Tensors on a different device are copied to ``device`` to be summed.
    """
    nbytes = 0
    by_dtype = itertools.groupby(gradients, key=lambda gradient: gradient.dtype)
    for bucket in (bucket for _, part in by_dtype for bucket in in_buckets(part, bucket_bytes, lambda g: g.nbytes)):
        alone = len(bucket) == 1 and bucket[0].is_contiguous()  # no copy, because a copy may take gigabytes
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


def zero_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Set gradients that are None to zeros, so that the optimizer applies momentum and weight decay to all
    parameters."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = torch.zeros_like(parameter, dtype=dtype)


def in_buckets(items: Iterable[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items with a total size of at most ``limit``. A larger item gets a list for itself."""
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
