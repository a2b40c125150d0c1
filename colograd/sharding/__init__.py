"""Sharding strategies: how ranks divide the policy's weights, gradients and optimizer state."""

from .strategy import ShardingStrategy
from .zero import check_sharding, strategy_name, strategy_of
