"""Sharding strategies: how ranks share out the training."""

from .strategy import ShardingStrategy
from .zero import check_sharding, strategy_name, strategy_of
