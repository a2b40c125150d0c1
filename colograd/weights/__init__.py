"""Publishing: the policy's weights become the engine's. `WeightSync` is the interface.

Its implementations are `shared`, `copied` (also for merged adapters), `gathered` and `adapter`. `selection` picks one,
or a class of the user's. `mapping` finds the engine tensor of each parameter. `proof` shows that the engine reads it
there, for most parameters at once with the changes of `sign_probe`.
"""

from .mapping import Slice
from .selection import check_adapter_in_parts, check_choice, expects_sharing, weight_sync
from .shared import bytes_apart, state_dict_on_host
from .sync import WeightSync
