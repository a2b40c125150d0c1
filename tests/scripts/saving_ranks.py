"""Two ranks save together. Started by tests/checkpoint/test_saving.py.

torchrun --nproc-per-node 2 saving_ranks.py FOLDER
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colograd.checkpoint import folders, writing
from colograd.checkpoint.writing import HostFiles, Save, Writer
from colograd.parallel.ranks import gather, rank, world_size


def save_of(run_dir: Path, step: int, apart: bool = False) -> Save:
    images, name = HostFiles(), f"part-{rank()}.safetensors"
    images.put({"w": torch.full((1000,), float(rank()))}, name)
    leads = apart or rank() == 0
    return Save(
        step=step,
        final=run_dir / f"checkpoint-{step}",
        aside=run_dir / folders.ASIDE / f"checkpoint-{step}.1",
        sources={name: images.take()[Path(name)], **({"trainer_state.json": b"{}"} if leads else {})},
        leads=leads,
        leaders=range(world_size()) if apart else (0,),
        members=(rank(),) if apart else range(world_size()),
        afterwards=lambda: None,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    writer, found, run_dir = Writer(), dict[str, Any](), folder / "run"

    def outcome(save: Save) -> list[str | None]:
        writer.begin(save, in_background=True)
        writer.wait(print)
        states = gather(writer.state())
        writer.present = None
        return states

    found["whole"] = outcome(save_of(run_dir, 1))
    write = writing.write_bytes

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank() == 1:
        writing.write_bytes = full
    found["one disk is full"] = outcome(save_of(run_dir, 2))
    writing.write_bytes = write
    found["again"] = outcome(save_of(run_dir, 3))
    found["apart"] = outcome(save_of(folder / f"node{rank()}", 5, apart=True))
    outcome(save_of(run_dir, 5))
    if rank() == 0:  # the other one doesn't come any more
        save, began = save_of(run_dir, 6), time.monotonic()
        writer.begin(save, in_background=True)
        writer.finish_alone()
        found["alone"], found["seconds alone"] = save.error, time.monotonic() - began
    (folder / f"rank{rank()}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
