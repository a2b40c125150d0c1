"""How much autograd keeps of a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def kept(model: Any, forward: Callable[[], Any]) -> int:
    """Return the bytes that autograd holds for the backward, each storage once, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert forward().requires_grad
    return sum(found.values())
