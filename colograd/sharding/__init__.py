"""Sharding: what the ranks share out of the policy's training. `way` says what every way of sharding does.

The ways are `whole` (each rank holds all), `zero` (each owns a part of the optimizer's state, or of the gradients too)
and `fsdp` (and of the weights); `selection` picks one. `parts` is what they have in common. `buckets` are what ranks
exchange, `blocks` what of a policy that is cut, whose `rows` come together again; `optimizer_state` and `weight_files`
are what they save and load.
"""

from .selection import check_sharding, name_of, way_of
from .way import Sharding
