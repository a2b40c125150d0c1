"""Picks the sharding strategy that a configuration asks for."""

from __future__ import annotations

from typing import Any

from ..config import GRPOConfig
from .fsdp import FullySharded
from .on_host import GradientsOnHost, OptimizerOnHost, WholeOnHost
from .shared_rows import RowsOfSharedGradients, RowsOfSharedOptimizer, RowsOfWholeCopies
from .strategy import ShardingStrategy
from .tensor import (
    RowsOfTensorGradients,
    RowsOfTensorOptimizer,
    RowsOfTensorParallel,
    TensorGradients,
    TensorOptimizer,
    TensorParallel,
)
from .whole import WholeCopies
from .zero import SharedGradients, SharedOptimizer

STRATEGIES: dict[str, type[ShardingStrategy]] = {
    "none": WholeCopies,
    "optimizer": SharedOptimizer,
    "gradients": SharedGradients,
    "tensor": TensorParallel,
    "tensor+optimizer": TensorOptimizer,
    "tensor+gradients": TensorGradients,
    "fsdp": FullySharded,
}
# Whose ranks share out the tokens of each row (`sequence_parallel_size`).
OF_ROWS: dict[str, type[ShardingStrategy]] = {
    "none": RowsOfWholeCopies,
    "optimizer": RowsOfSharedOptimizer,
    "gradients": RowsOfSharedGradients,
    "tensor": RowsOfTensorParallel,
    "tensor+optimizer": RowsOfTensorOptimizer,
    "tensor+gradients": RowsOfTensorGradients,
}
# With sums of gradients in host memory; `fsdp_offload_params` is FSDP's way.
ON_HOST: dict[str, type[ShardingStrategy]] = {
    "none": WholeOnHost,
    "optimizer": OptimizerOnHost,
    "gradients": GradientsOnHost,
}


def strategy_name(config: GRPOConfig) -> str:
    return config.sharding if config.world_size > 1 else "none"


def strategy_of(config: GRPOConfig) -> type[ShardingStrategy]:
    if config.sequence_parallel_size > 1:
        assert not config.offloads_gradients
        return OF_ROWS[strategy_name(config)]
    return (ON_HOST if config.offloads_gradients else STRATEGIES)[strategy_name(config)]


def check_sharding(config: GRPOConfig, optimizer: Any) -> None:
    """Raise a ValueError if the given optimizer's state might be made for whole parameters."""
    if optimizer is not None and config.sharding != "none":
        raise ValueError(
            f"sharding is {config.sharding!r} and an optimizer is given ({type(optimizer).__name__}), but each rank's "
            "holds slices of parameters: leave optimizers out and name it with optim, or set sharding: none."
        )
