"""Train on two ranks, several times over, with a reward that goes wrong on rank 1 only. Started by
tests/rewards/test_reward_faults.py under torchrun.

    torchrun --nproc-per-node 2 reward_faults.py MODEL RUN_DIR OUT_DIR CASE...

One trainer for all cases (see `reward_cases.faulty`). Each rank writes how every case ended there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
from reward_cases import faulty

from colograd import GRPOTrainer

RANK = int(os.environ["RANK"])


def weights(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    model, run_dir, out_dir, *cases = sys.argv[1:]
    steering = Path(out_dir, f"case-of-rank{RANK}")
    os.environ["REWARD_FAULT_FILE"] = str(steering)  # before the worker starts
    config = tiny.config(run_dir, max_steps=1, reward_workers=1, reward_timeout=30.0)
    trainer = GRPOTrainer(model, faulty, config, tiny.prompts())
    ends = {}
    for case in cases:
        steering.write_text(case if RANK == 1 else "")
        before, started, problem = weights(trainer.model), time.monotonic(), ""
        try:
            trainer.train()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        entry: dict[str, Any] = next((e for e in reversed(trainer.state.log_history) if "reward" in e), {})
        ends[case] = {
            "problem": problem,
            "seconds": time.monotonic() - started,
            "before": before,
            "weights": weights(trainer.model),
            "metrics": {name: entry[name] for name in entry if name.startswith("rewards/")} if not problem else {},
        }
    Path(out_dir, f"rank{RANK}.json").write_text(json.dumps(ends))
    trainer.close()


if __name__ == "__main__":
    main()
