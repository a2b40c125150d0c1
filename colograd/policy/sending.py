"""Copies of small tensors from host memory to the device, and differentiable sums over a group of ranks."""

from __future__ import annotations

import torch

from ..parallel.shards import RankGroup


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``. For a GPU it is pinned first, so that the host doesn't wait for the copy."""
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def enter(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return ``tensor`` unchanged. The backward sums its incoming gradient over the ranks of ``group``.

    A rank alone has only a part of the gradient, because the rank computes with its shard of the weights.
    """
    entered = tensor.view_as(tensor)
    if entered.requires_grad:
        entered.register_hook(lambda gradient: group.sum_(gradient.clone(memory_format=torch.contiguous_format)))
    return entered


def leave(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum of ``tensor`` over the ranks of ``group``. The backward passes the incoming gradient on."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.sum_(total.detach())
    return total
