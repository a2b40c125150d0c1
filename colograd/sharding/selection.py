"""Picks the way of sharding that a configuration asks for."""

from __future__ import annotations

from ..config import GRPOConfig
from .way import Sharding
from .whole import WholeCopies
from .zero import SharedGradients, SharedOptimizer

WAYS: dict[str, type[Sharding]] = {"none": WholeCopies, "optimizer": SharedOptimizer, "gradients": SharedGradients}


def way_of(config: GRPOConfig) -> type[Sharding]:
    """The class of the way. One rank has nobody to share with."""
    return WAYS[config.sharding if config.world_size > 1 else "none"]
