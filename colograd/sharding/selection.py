"""Selection of the run's sharding strategy by the configuration.

Extensions register further strategies (classes with a `name`) as "sharding", and variants of strategies as
"sharding_variant". A variant is a function of the selected class and the configuration. It returns the class, or a
subclass.
"""

from __future__ import annotations

from typing import Any

from ..config import GRPOConfig
from ..runtime import registry
from ..runtime.importing import find_object, is_import_path
from .strategy import ShardingStrategy
from .zero import SharedGradients, SharedOptimizer, WholeCopies

STRATEGIES: dict[str, type[ShardingStrategy]] = {
    way.name: way for way in (WholeCopies, SharedOptimizer, SharedGradients)
}


def strategy_name(config: GRPOConfig) -> str:
    return config.sharding if config.world_size > 1 or is_import_path(config.sharding) else "none"


def strategy_of(config: GRPOConfig) -> type[ShardingStrategy]:
    name = strategy_name(config)
    if is_import_path(name):
        return find_strategy(name)
    way = STRATEGIES.get(name) or next(way for way in registry.hooks("sharding") if way.name == name)
    for variant in registry.hooks("sharding_variant"):
        way = variant(way, config)
    return way


def find_strategy(path: str) -> type[ShardingStrategy]:
    """Import the user's `ShardingStrategy` class from ``path``. Another object, or a missing one, is a ValueError."""
    way = find_object(path, "sharding", lambda value: isinstance(value, type))
    if not (isinstance(way, type) and issubclass(way, ShardingStrategy)):
        raise ValueError(
            f"sharding is {path!r}, which isn't a class derived from colograd.sharding.ShardingStrategy: derive it "
            "from that class, or from colograd.sharding.zero.WholeCopies to change a part."
        )
    if missing := sorted(way.__abstractmethods__):
        raise ValueError(
            f"sharding is {path!r}, a class without the method {missing[0]}: define it, see "
            "colograd/sharding/strategy.py."
        )
    return way


def check_sharding(config: GRPOConfig, optimizer: Any) -> None:
    """Raise a ValueError if the user's strategy can't be found, or if the user's optimizer is combined with sharding:
    its state may need whole parameters."""
    if is_import_path(config.sharding):
        find_strategy(config.sharding)
    if optimizer is not None and config.sharding != "none":
        raise ValueError(
            f"sharding is {config.sharding!r}, which can't use the optimizer passed to the trainer "
            f"({type(optimizer).__name__}): each rank's optimizer has slices of parameters. Remove the argument "
            "optimizers and set optim, or set sharding: none."
        )
