"""Publishing: how a step's weights become the engine's. `way` says what every way of publishing does.

The ways are `shared`, `copied`, `gathered`, `adapter` and `merged`; `selection` picks one, or takes a class of the
user's. `mapping` says which engine tensor holds which parameter,
`proof` shows that it does, of most parameters at once by the changes that `sign_probe` makes.
"""

from .mapping import Slice, packed_parts
from .selection import check_choice, expects_sharing, publisher, serves_packed
from .shared import bytes_apart, state_dict_on_host
from .way import Publisher
