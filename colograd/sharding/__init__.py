"""Sharding strategies: `ShardingStrategy` is their interface, and `zero` chooses the strategy of a run."""

from .strategy import ShardingStrategy
from .zero import check_sharding, strategy_name, strategy_of
