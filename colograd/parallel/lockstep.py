"""Keep the ranks of a vLLM engine in step: the first rank (leader) decides, and the other ranks follow its messages.

Decisions that depend on a clock, a user's function or a rank's state may differ between ranks. So only the leader makes
these decisions, and sends the results to the followers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import watchdog
from .layout import RankLayout


class Lockstep:
    """A channel for messages from the first rank of a vLLM engine (leader) to the engine's other ranks (followers). All
    ranks must construct it together. Followers wait up to ``patience`` seconds for a message."""

    def __init__(self, layout: RankLayout, patience: float) -> None:
        self.leads = layout.engine_place == 0
        self._leader = layout.engine_group[0]
        size = layout.ranks_per_engine
        engines = [[*range(first, first + size)] for first in range(0, layout.world_size, size)]
        # Use gloo, because NCCL would send Python objects through the GPUs.
        groups = [dist.new_group(ranks, timedelta(seconds=patience), backend="gloo") for ranks in engines]
        self._group = groups[layout.data_rank]

    def tell(self, message: Any) -> None:
        """Send a message (any picklable object) from the engine's first rank to the engine's other ranks."""
        dist.broadcast_object_list([message], self._leader, self._group)

    def listen(self) -> Any:
        """Wait for the next message from the engine's first rank, and return the message."""
        message: list[Any] = [None]
        dist.broadcast_object_list(message, self._leader, self._group)
        watchdog.progress("a step of the engine")
        return message[0]
