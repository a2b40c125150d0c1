"""Weight syncs: copy the policy's weights into the engine, or let both share memory. `WeightSync` is the interface.

The implementations are `shared` and `copied` (also for merged LoRA adapters) in `sync`, and `gathered` and `adapter` in
extensions. `selection` chooses an implementation or the user's class. `mapping` finds each parameter's engine tensor.
`proof` checks at start that the engine reads the mapped tensors.
"""

from .mapping import Slice
from .selection import check_choice, expects_sharing, weight_sync
from .sync import WeightSync, bytes_apart, state_dict_on_host
