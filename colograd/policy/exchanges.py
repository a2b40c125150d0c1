"""Sums over ranks in a forward or its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..parallel.shards import RankGroup


class _Enter(torch.autograd.Function):
    """Identity in the forward; sum of the ranks' gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum_(gradient.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    """Sum of the ranks' tensors in the forward; identity in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
        return group.sum_(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def enter(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return a tensor that all ranks of ``group`` have; its backward sums the gradients from their parts of weights."""
    return _Enter.apply(tensor, group) if tensor.requires_grad else tensor


def leave(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Sum the ranks' partial results."""
    found: torch.Tensor = _Leave.apply(tensor, group)
    return found
