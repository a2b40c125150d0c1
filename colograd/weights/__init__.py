"""Publishing: how a step's weights become the engine's. `plan` picks a way: `shared`, `copied`, `adapter` or `merged`.
`mapping` says which engine tensor holds which parameter, `proof` shows that it does, `addresses` that none has moved.

A way is a class with ``publish(version) -> int`` (bytes moved), which leaves the engine stamped with that version;
``describe() -> str``, one line for the start of a run; and ``differing() -> list[str]``, the parameters whose value in
the engine isn't the policy's.
"""

from .plan import Publisher, check_choice, expects_sharing, publisher
from .shared import bytes_apart, state_dict_on_host

__all__ = ["Publisher", "bytes_apart", "check_choice", "expects_sharing", "publisher", "state_dict_on_host"]
