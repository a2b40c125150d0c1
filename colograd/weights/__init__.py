"""Publishing: how a step's weights become the engine's. `WeightSync` is the interface.

They are `shared`, `copied` (also of merged adapters), `gathered` and `adapter`; `selection` picks one, or takes a class
of the user's. `mapping` says which engine tensor holds which parameter, `proof` shows that it does, of most at once by
the changes that `sign_probe` makes.
"""

from .mapping import Slice, packed_parts
from .selection import check_adapter_in_parts, check_choice, expects_sharing, serves_packed, weight_sync
from .shared import bytes_apart, state_dict_on_host
from .sync import WeightSync
