"""Sharding: strategies that divide weights, gradients and optimizer state of the policy over ranks.

`ShardingStrategy` is the interface. `zero` and extensions implement it. `selection` chooses the strategy of a run.
"""

from .selection import check_sharding, strategy_name, strategy_of
from .strategy import ShardingStrategy
