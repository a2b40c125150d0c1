"""Ranks: what they agree on between two collectives, and the one exchange of gradients.

The unsharded policy isn't wrapped in DistributedDataParallel: that refuses float32 gradients on bfloat16 parameters,
and would reduce once per micro-batch. Gradients are summed over ranks in buckets, once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


class RankError(RuntimeError):
    """Another rank failed: this one ends with the same message instead of waiting for it."""


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run the body on all ranks; if it raises on any, every rank raises before its next collective.

    The failing rank keeps its own exception; the others raise `RankError` with its text. Where ranks failed for want of
    memory alone, every rank raises `torch.OutOfMemoryError`, so that all can try again alike. The body may contain no
    collective that a failing rank would skip.
    """
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if world_size() > 1:
        memory = isinstance(failure, torch.OutOfMemoryError)
        reports = gather(None if failure is None else (memory, f"{type(failure).__name__}: {failure}"))
        reported = [(other, *report) for other, report in enumerate(reports) if report is not None]
        faults = [f"Rank {other} failed in {what}: {text}" for other, of_memory, text in reported if not of_memory]
        if faults and (failure is None or memory):
            raise RankError(faults[0])
        if reported and not faults and failure is None:
            raise torch.OutOfMemoryError(f"Rank {reported[0][0]} failed in {what}: {reported[0][2]}")
    if failure is not None:
        raise failure


def gather(value: T) -> list[T]:
    """Every rank's ``value`` (any picklable object), in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_gradients(parameters: Sequence[torch.Tensor], bucket_bytes: int = 64 * 2**20) -> int:
    """Sum ``.grad`` over ranks, in place. A missing gradient counts as zeros.

    Returns:
        Bytes that went through collectives.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if world_size() == 1:
        return 0
    for parameter in trainable:
        if parameter.grad is None:
            set_zero_gradient(parameter)
    moved = 0
    for bucket in _buckets([p.grad for p in trainable if p.grad is not None], bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        moved += flat.numel() * flat.element_size()
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return moved


def set_zero_gradient(parameter: torch.Tensor) -> None:
    """Zero, not missing: momentum and decay then act as they would have."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    parameter.grad = torch.zeros_like(parameter, dtype=dtype)


def _buckets(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype, up to ``size`` bytes together."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and (filled + nbytes > size or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += nbytes
    if bucket:
        yield bucket
