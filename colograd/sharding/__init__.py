"""Sharding: strategies that divide weights, gradients and optimizer state among ranks.

`ShardingStrategy` is the interface; `zero` and extensions implement it; `selection` picks one.
"""

from .selection import check_sharding, strategy_name, strategy_of
from .strategy import ShardingStrategy
