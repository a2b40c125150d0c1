"""The one exchange of gradients between ranks, once per optimizer step.

The unsharded policy isn't wrapped in DistributedDataParallel: that refuses float32 gradients on bfloat16 parameters,
and would reduce once per micro-batch. Gradients are summed over ranks in buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from .ranks import world_size


def sum_gradients(parameters: Sequence[torch.Tensor], bucket_bytes: int = 64 * 2**20) -> int:
    """Sum ``.grad`` over ranks, in place. A missing gradient counts as zeros.

    Returns:
        Bytes that went through collectives.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if world_size() == 1:
        return 0
    zero_gradients(trainable)
    moved = 0
    for bucket in _buckets([p.grad for p in trainable if p.grad is not None], bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        moved += flat.numel() * flat.element_size()
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return moved


def zero_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Zero, not missing, where there is none: momentum and decay then act as they would have."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
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
