"""Ranks that wait for one that makes no progress. Started by tests/parallel/test_watchdog.py.

    hanging_ranks.py FAULT LIMIT

FAULT, of the last rank: it `sleeps`, or `holds` Python's lock in a call that doesn't return, or `stops` its process; or
the first rank does (`first`). Before, it prints "hangs". LIMIT: seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from colograd.parallel import faults, watchdog
from colograd.parallel.faults import ends_together
from colograd.parallel.ranks import gather, join, rank, world_size
from colograd.runtime import process

FAULT, LIMIT = sys.argv[1], float(sys.argv[2])


def hang() -> None:
    print("hangs", flush=True)
    watchdog.progress("reward function 'judge'")
    if FAULT == "sleeps":
        time.sleep(300)
    time.sleep(3 * watchdog.tick())  # which lets a sign of life go out
    if FAULT == "holds":
        ctypes.PyDLL(None).sleep(300)
    if FAULT in ("stops", "first"):
        os.kill(os.getpid(), signal.SIGSTOP)


@ends_together("training")
def train() -> None:
    gather("all are here")
    if rank() == (0 if FAULT == "first" else world_size() - 1):
        hang()
    if world_size() > 1:
        dist.all_reduce(torch.ones(1))


def main() -> None:
    process.prepare_network()
    join(timedelta(seconds=300))
    watchdog.set_limit(LIMIT)
    train()
    faults.leave()
    print("done", flush=True)


if __name__ == "__main__":
    main()
