"""Train the tiny model with `carry_over`; die by SIGKILL in a reward function's N-th call.

Started by tests/extensions/carry_over/test_carry_over.py.

    python carrying_run.py MODEL RUN_DIR SETTINGS.json [N]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny

from colograd import GRPOTrainer


def main() -> None:
    model, run_dir, settings, *kill_at = sys.argv[1:]
    calls = 0

    def judge(completions: list[Any], **kwargs: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if kill_at and calls == int(kill_at[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        return tiny.vowels(completions)

    trainer = GRPOTrainer(model, judge, tiny.config(run_dir, **tiny.CARRYING | json.loads(settings)), tiny.prompts())
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(run_dir)


if __name__ == "__main__":
    main()
