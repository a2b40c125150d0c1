"""Ranks that must do the same at the same time: the first of a group decides, the others do what it tells them.

What a clock, a user's function or one rank's state decides can't be decided on each rank again: only the leader runs
such code, and sends the others what comes of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import watchdog
from .layout import RankLayout


class Lockstep:
    """The ranks of one engine, whose followers wait ``patience`` seconds for the next message. Making it is a
    collective of all ranks."""

    def __init__(self, layout: RankLayout, patience: float) -> None:
        self.leads = layout.engine_place == 0
        self._leader = layout.engine_group[0]
        size = layout.ranks_per_engine
        every = [[*range(first, first + size)] for first in range(0, layout.world_size, size)]
        # gloo, as messages are objects: over NCCL they would go through the GPUs.
        groups = [dist.new_group(ranks, timedelta(seconds=patience), backend="gloo") for ranks in every]
        self._group = groups[layout.data_rank]

    def tell(self, message: Any) -> None:
        """Send a message (any picklable object) to all followers."""
        dist.broadcast_object_list([message], self._leader, self._group)

    def listen(self) -> Any:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, self._leader, self._group)
        watchdog.progress("a step of the engine")
        return message[0]
