"""Lockstep of the ranks of an engine: the first rank decides, and the others follow its messages.

A decision by a clock, a user's function or one rank's state may differ between ranks. So only the leader runs such
code, and sends the result to the others.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import watchdog
from .layout import RankLayout


class Lockstep:
    """The message channel of one engine's ranks, which all ranks construct together. Followers wait up to ``patience``
    seconds for the next message."""

    def __init__(self, layout: RankLayout, patience: float) -> None:
        self.leads = layout.engine_place == 0
        self._leader = layout.engine_group[0]
        size = layout.ranks_per_engine
        engines = [[*range(first, first + size)] for first in range(0, layout.world_size, size)]
        # gloo, because messages are objects: over NCCL they would pass through the GPUs.
        groups = [dist.new_group(ranks, timedelta(seconds=patience), backend="gloo") for ranks in engines]
        self._group = groups[layout.data_rank]

    def tell(self, message: Any) -> None:
        """Send a message (any picklable object) to all followers."""
        dist.broadcast_object_list([message], self._leader, self._group)

    def listen(self) -> Any:
        """Wait for the leader's next message and return it."""
        message: list[Any] = [None]
        dist.broadcast_object_list(message, self._leader, self._group)
        watchdog.progress("a step of the engine")
        return message[0]
