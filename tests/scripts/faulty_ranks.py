"""Ranks of which one fails while the others wait for it in an exchange. Started by tests/test_faults.py.

    torchrun --nproc-per-node N faulty_ranks.py FAULT

FAULT, on the last rank: `raises` an error in the middle, `killed` by SIGKILL, `stops` answering until the limit of
an exchange (3 s); `late`, it fails before the others come; `skips`, it fails in a body that has exchanges; `caught`:
all ranks fail alike, catch it and go on; `ends` its process in good order while others still write; `main`: the first
rank is killed; `object`: nothing fails, values are gathered beside an exchange that only one rank is in.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from colograd.parallel import faults
from colograd.parallel.faults import ends_together
from colograd.parallel.ranks import RankError, join, rank, together, world_size

FAULT = sys.argv[1]


def exchange() -> None:
    dist.all_reduce(torch.ones(1))


@ends_together("training")
def train() -> None:
    exchange()
    failing = 0 if FAULT == "main" else world_size() - 1
    if FAULT == "caught":
        with together("the step"):
            if rank() == failing:
                raise FloatingPointError("the loss is nan")
    elif rank() == failing:
        if FAULT in ("killed", "main"):
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "stops":
            time.sleep(60)
        if FAULT == "raises":
            raise ValueError("no room on the last rank")
        if FAULT == "skips":
            with together("the forward", exchanges=True):
                raise torch.OutOfMemoryError("no room on the last rank")
    elif FAULT == "late":
        time.sleep(1)
    if FAULT == "skips":
        with together("the forward", exchanges=True):
            exchange()
    exchange()


@ends_together("saving")
def save() -> None:
    if rank() == 0:
        time.sleep(2)


def main() -> None:
    join(timedelta(seconds=3 if FAULT == "stops" else 60))
    if FAULT == "caught":
        for _ in range(3):
            try:
                train()
            except (FloatingPointError, RankError) as error:
                print(f"rank {rank()} goes on after: {error}", flush=True)
        time.sleep(2)
        exchange()
    elif FAULT == "ends":
        save()
        faults.leave()
    else:
        train()
    print(f"rank {rank()} is done", flush=True)


if __name__ == "__main__":
    main()
