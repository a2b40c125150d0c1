"""Sums over ranks in a forward or its backward."""

from __future__ import annotations

import torch

from ..parallel.shards import RankGroup


def enter(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return a tensor that all ranks of ``group`` have; its backward sums the gradients from their parts of weights."""
    if not tensor.requires_grad:
        return tensor
    entered = tensor.view_as(tensor)
    if entered.requires_grad:  # not in a forward without gradients
        entered.register_hook(lambda gradient: group.sum_(gradient.clone(memory_format=torch.contiguous_format)))
    return entered


def leave(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Sum the ranks' partial results; the backward is the identity."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.sum_(total.detach())
    return total
