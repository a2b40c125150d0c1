"""Three ranks exchange messages and report the received messages and bytes. Started by test_deliver.py.

Rank 0 sends a large message to rank 2, and rank 2 a small one to rank 0. Rank 1 takes part in the collective alone.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colograd.parallel import ranks

MESSAGES = {0: {2: "x" * 100_000}, 1: {}, 2: {0: "y"}}

if __name__ == "__main__":
    ranks.join(timedelta(seconds=60))
    received, plain = [0], dist.irecv

    def counted(buffer: Any, *args: Any) -> Any:
        received[0] += buffer.nbytes
        return plain(buffer, *args)

    dist.irecv = counted
    place = ranks.rank()
    senders = [sender for sender, messages in MESSAGES.items() if place in messages]
    messages = ranks.deliver(MESSAGES[place], senders)
    print(json.dumps([[*messages], [len(message) for message in messages.values()], received[0]]))
    ranks.part()
