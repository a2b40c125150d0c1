"""Differentiable all-reduce for tensor-parallel layers: a sum over ranks in the backward, or in the forward."""

from __future__ import annotations

import torch

from ..parallel.shards import RankGroup


def enter(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return ``tensor``, which is equal on all ranks of ``group``. The backward sums the gradient over the ranks,
    because each rank computes with a shard of the weights."""
    if not tensor.requires_grad:
        return tensor
    entered = tensor.view_as(tensor)
    if entered.requires_grad:  # Under `torch.no_grad` no hook can be registered.
        entered.register_hook(lambda gradient: group.sum_(gradient.clone(memory_format=torch.contiguous_format)))
    return entered


def leave(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum of the tensors of all ranks of ``group``. The backward passes the gradient on unchanged."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.sum_(total.detach())
    return total
