"""Train the tiny model on several nodes and write each rank's results.

Started by tests/training/test_nodes.py.

    torchrun --nnodes 2 --nproc-per-node 2 ... node_ranks.py MODEL RUN_DIR OUT_DIR STOP_AT

RUN_DIR is this node's own. In step STOP_AT the ranks of the second node report that they have come there, and wait
to be killed; 0: in none.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import torch
import torch.distributed as dist

from colograd import GRPOTrainer

RANK = int(os.environ["RANK"])
MODEL, RUN_DIR, OUT_DIR, STOP_AT = sys.argv[1:5]


def reward(completions, trainer_state, **kwargs):
    if RANK >= 2 and trainer_state.global_step + 1 == int(STOP_AT):
        Path(OUT_DIR, f"waits-{RANK}").touch()
        time.sleep(600)
    return tiny.vowels(completions)


def limit_of(group: dist.ProcessGroup | None) -> float:
    """Seconds."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def main() -> None:
    config = tiny.config(
        RUN_DIR, sharding="gradients", save_strategy="steps", save_steps=2, save_total_limit=1, ddp_timeout=240
    )
    trainer = GRPOTrainer(MODEL, reward, config, tiny.prompts())
    from vllm.distributed.parallel_state import get_world_group

    trainer.train(resume_from_checkpoint="auto")
    found = hashlib.sha256()
    for parameter in trainer.model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    result = {
        "host": socket.gethostname(),
        "node": config.layout.node,
        "limits": [limit_of(None), limit_of(get_world_group().cpu_group)],
        "weights": found.hexdigest(),
        "steps": [entry["step"] for entry in trainer.state.log_history if "reward" in entry],
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    }
    trainer.save_model(RUN_DIR)
    trainer.close()
    Path(OUT_DIR, f"rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
