"""Copies of small tensors from host memory to the device, and differentiable sums over tensor-parallel ranks."""

from __future__ import annotations

import torch

from ..parallel.shards import RankGroup


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``. A copy of unpinned memory would wait for the device's earlier work."""
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def enter(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return ``tensor``. The backward sums its gradient over ranks, because each rank computes with its shard."""
    entered = tensor.view_as(tensor)
    if entered.requires_grad:
        entered.register_hook(lambda gradient: group.sum_(gradient.clone(memory_format=torch.contiguous_format)))
    return entered


def leave(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum of the tensors of all ranks. The backward passes the gradient on unchanged."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.sum_(total.detach())
    return total
