"""Sharding: what the ranks share out of the policy's training. `way` says what every way of sharding does.

The ways are `whole` (each rank holds all) and `zero` (each owns a part of the optimizer's state, or of the gradients
too); `selection` picks one. `buckets` are what ranks exchange, `optimizer_state` is what they save.
"""

from .selection import check_sharding, way_of
from .way import Sharding
