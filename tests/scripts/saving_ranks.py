"""Two ranks save together. Started by tests/training/test_saving.py.

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

from colograd.parallel.ranks import gather, rank, world_size
from colograd.training import checkpoints, saving
from colograd.training.host_files import HostFiles
from colograd.training.saving import Save, Saves


def save_of(run_dir: Path, step: int, apart: bool = False) -> Save:
    images, name = HostFiles(), f"part-{rank()}.safetensors"
    images.put({"w": torch.full((1000,), float(rank()))}, name)
    leads = apart or rank() == 0
    return Save(
        step=step,
        final=run_dir / f"checkpoint-{step}",
        aside=checkpoints.aside_folder(run_dir) / f"checkpoint-{step}.1",
        sources={name: images.take()[Path(name)], **({"trainer_state.json": b"{}"} if leads else {})},
        leads=leads,
        leaders=range(world_size()) if apart else (0,),
        members=(rank(),) if apart else range(world_size()),
        afterwards=lambda: None,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    saves, found, run_dir = Saves(), dict[str, Any](), folder / "run"

    def outcome(save: Save) -> list[str | None]:
        saves.begin(save, beside=True)
        saves.wait(print)
        states = gather(saves.state())
        saves.present = None
        return states

    found["whole"] = outcome(save_of(run_dir, 1))
    write = saving.write_image

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank() == 1:
        saving.write_image = full
    found["one disk is full"] = outcome(save_of(run_dir, 2))
    saving.write_image = write
    found["again"] = outcome(save_of(run_dir, 3))
    found["apart"] = outcome(save_of(folder / f"node{rank()}", 5, apart=True))
    outcome(save_of(run_dir, 5))
    if rank() == 0:  # the other one doesn't come any more
        save, began = save_of(run_dir, 6), time.monotonic()
        saves.begin(save, beside=True)
        saves.finish_alone()
        found["alone"], found["seconds alone"] = save.error, time.monotonic() - began
    (folder / f"rank{rank()}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
