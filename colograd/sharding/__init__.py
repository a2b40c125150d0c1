"""Sharding: the strategies by which ranks share weights, gradients and optimizer state: `whole`, `zero` and `fsdp`.

`ShardingStrategy` is the interface; `selection` picks one.
"""

from .selection import check_sharding, strategy_name, strategy_of
from .strategy import ShardingStrategy
