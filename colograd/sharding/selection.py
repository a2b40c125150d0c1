"""Selection of the run's sharding strategy by the configuration.

Extensions register further strategies (classes with a `name`) as "sharding", and variants of strategies as
"sharding_variant". A variant is a function of the selected class and the configuration. It returns the class, or a
subclass.
"""

from __future__ import annotations

from typing import Any

from ..config import GRPOConfig
from ..runtime import registry
from .strategy import ShardingStrategy
from .zero import SharedGradients, SharedOptimizer, WholeCopies

STRATEGIES: dict[str, type[ShardingStrategy]] = {
    way.name: way for way in (WholeCopies, SharedOptimizer, SharedGradients)
}


def strategy_name(config: GRPOConfig) -> str:
    return config.sharding if config.world_size > 1 else "none"


def strategy_of(config: GRPOConfig) -> type[ShardingStrategy]:
    name = strategy_name(config)
    way = STRATEGIES.get(name) or next(way for way in registry.hooks("sharding") if way.name == name)
    for variant in registry.hooks("sharding_variant"):
        way = variant(way, config)
    return way


def check_sharding(config: GRPOConfig, optimizer: Any) -> None:
    """Raise a ValueError if the user's optimizer is combined with sharding. Its state may need whole parameters."""
    if optimizer is not None and config.sharding != "none":
        raise ValueError(
            f"sharding is {config.sharding!r}, which can't use the optimizer passed to the trainer "
            f"({type(optimizer).__name__}): each rank's optimizer has slices of parameters. Remove the argument "
            "optimizers and set optim, or set sharding: none."
        )
