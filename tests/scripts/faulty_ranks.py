"""Ranks that wait for the last one, which fails.

Started by tests/parallel/test_faults.py and tests/training/test_nodes.py.

    faulty_ranks.py FAULT [FOLDER]

FAULT: it `raises` in the middle; reports that it failed and waits elsewhere (`tells`); fails before the others come
(`early`); is `killed`, or the first rank instead (`first`), or while others wait where nothing wakes them (`stuck`);
doesn't come within the 3 s that an exchange may take (`absent`). All fail alike, catch it and go on (`caught`); it ends
in good order while the first still writes (`leaves`); it gets a scheduler's signal while the others wait
(`stops`); all say in FOLDER that they wait for each other, and do (`cut`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from colograd.parallel import faults
from colograd.parallel.faults import ends_together
from colograd.parallel.ranks import RankError, join, on_all_ranks, rank, world_size
from colograd.runtime import process

FAULT = sys.argv[1]
LIMIT = {"absent": 3, "stuck": 3, "tells": 20}.get(FAULT, 60)


def exchange() -> None:
    dist.all_reduce(torch.ones(1))


def is_failing() -> bool:
    return rank() == (0 if FAULT == "first" else world_size() - 1)


def fail() -> None:
    if FAULT in ("killed", "first", "stuck"):
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "absent":
        time.sleep(60)
    if FAULT == "tells":
        with contextlib.suppress(ValueError), faults.telling("a step"):
            raise ValueError("no room on the last rank")
        time.sleep(15)
    if FAULT == "stops":
        faults.tell_stop("SIGTERM", 30.0)
        while dist.distributed_c10d._get_default_store().add("told", 0) < world_size():
            time.sleep(0.05)
    if FAULT in ("raises", "early"):
        raise ValueError("no room on the last rank")


def hear(name: str, seconds: float) -> None:
    print(f"told: {name}, {seconds:g} s", flush=True)
    dist.distributed_c10d._get_default_store().add("told", 1)


@ends_together("the start")
def begin() -> None:
    exchange()


@ends_together("training")
def train() -> None:
    if FAULT == "caught":
        with on_all_ranks("the forward"):
            if is_failing():
                raise torch.OutOfMemoryError("no room on the last rank")
    if is_failing():
        fail()
    if FAULT == "stuck":
        time.sleep(60)  # as in a GPU's exchange
    if FAULT == "cut":
        Path(sys.argv[2], f"waits-{rank()}").touch()
        time.sleep(300)
    exchange()


@ends_together("saving")
def save() -> None:
    if rank() == 0:
        time.sleep(1)


def main() -> None:
    atexit.register(lambda: print(f"at its end: {'waits' if dist.is_initialized() else 'has parted'}"))
    process.prepare_network()
    join(timedelta(seconds=LIMIT))
    faults.stop_listeners.append(hear)
    begin()
    if FAULT == "early" and not is_failing():
        time.sleep(2)
    for _ in range(2 if FAULT == "caught" else 1):
        try:
            train() if FAULT != "leaves" else save()
        except (torch.OutOfMemoryError, RankError) as error:
            if FAULT != "caught":
                raise
            print(f"goes on after: {error}", flush=True)
    if FAULT == "caught":
        begin()
    faults.leave()


if __name__ == "__main__":
    main()
