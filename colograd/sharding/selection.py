"""The selection of the sharding strategy by the configuration."""

from __future__ import annotations

from typing import Any

from ..config import GRPOConfig
from ..extensions.offload.on_host import GradientsOnHost, OptimizerOnHost, WholeOnHost
from ..extensions.sequence_parallel.shared_rows import RowsOfSharedGradients, RowsOfSharedOptimizer, RowsOfWholeCopies
from ..extensions.tensor_parallel.strategy import (
    RowsOfTensorGradients,
    RowsOfTensorOptimizer,
    RowsOfTensorParallel,
    TensorGradients,
    TensorOptimizer,
    TensorParallel,
)
from .fsdp import FullySharded
from .strategy import ShardingStrategy
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
# Strategies with `sequence_parallel_size` above 1: ranks divide the tokens of each row.
OF_ROWS: dict[str, type[ShardingStrategy]] = {
    "none": RowsOfWholeCopies,
    "optimizer": RowsOfSharedOptimizer,
    "gradients": RowsOfSharedGradients,
    "tensor": RowsOfTensorParallel,
    "tensor+optimizer": RowsOfTensorOptimizer,
    "tensor+gradients": RowsOfTensorGradients,
}
# Strategies with `offload_gradients`: sums of gradients are in host memory. FSDP has `fsdp_offload_params` instead.
ON_HOST: dict[str, type[ShardingStrategy]] = {
    "none": WholeOnHost,
    "optimizer": OptimizerOnHost,
    "gradients": GradientsOnHost,
}


def strategy_name(config: GRPOConfig) -> str:
    """Return the run's `sharding`; "none" with one rank."""
    return config.sharding if config.world_size > 1 else "none"


def strategy_of(config: GRPOConfig) -> type[ShardingStrategy]:
    """Return the strategy of a run."""
    if config.sequence_parallel_size > 1:
        assert not config.offloads_gradients
        return OF_ROWS[strategy_name(config)]
    return (ON_HOST if config.offloads_gradients else STRATEGIES)[strategy_name(config)]


def check_sharding(config: GRPOConfig, optimizer: Any) -> None:
    """Check that a run with sharding creates its own optimizer, because another one may have state of whole parameters.

    Raises:
        ValueError: an optimizer is passed.
    """
    if optimizer is not None and config.sharding != "none":
        raise ValueError(
            f"sharding is {config.sharding!r}, which can't use the optimizer passed to the trainer "
            f"({type(optimizer).__name__}): each rank's optimizer has slices of parameters. Remove the argument "
            "optimizers and set optim, or set sharding: none."
        )
