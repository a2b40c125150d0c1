"""Sharding strategies: `ShardingStrategy` is their interface, and `selection` chooses the strategy of a run."""

from .selection import check_sharding, strategy_name, strategy_of
from .strategy import ShardingStrategy
