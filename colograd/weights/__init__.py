"""Weight syncs: copy the policy's weights into the engine, or let both share memory."""

from .mapping import Slice
from .selection import check_choice, expects_sharing, weight_sync
from .sync import WeightSync, bytes_apart, state_dict_on_host
