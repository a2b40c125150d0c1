"""Train the tiny model and record every step; die by SIGKILL at a given moment. Started by tests/test_resume.py.

    python record.py MODEL RUN_DIR RECORD.jsonl [KILL_AT]

KILL_AT: `rollout:N` (between two groups of step N), `backward:N` (gradients there, optimizer not yet), `model:N`
(model of checkpoint N written, optimizer not yet), `rename:N` (checkpoint N whole, not yet renamed), `renamed:N`
(just renamed).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny

from colograd import GRPOTrainer
from colograd.training import checkpoints


def die(moment: str) -> None:
    if len(sys.argv) > 4 and sys.argv[4] == moment:
        os.kill(os.getpid(), signal.SIGKILL)


class Recording(GRPOTrainer):
    record: Path

    def generate(self, prompts):
        if self.saves.present is not None:
            self.saves.present.done.wait()  # so that it is known which checkpoint is the last one
        groups = []
        for index, group in enumerate(super().generate(prompts)):
            if index == 1:
                die(f"rollout:{self.state.global_step + 1}")
            groups.append(group)
            yield group
        groups.sort(key=lambda group: group.position)
        self.completions = [list(rollout.completion_ids) for group in groups for rollout in group.rollouts]

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        step = self.state.global_step + 1
        die(f"backward:{step}")
        with self.record.open("a") as file:
            line = {"step": step, "loss": loss.double().item().hex(), "completions": self.completions}
            line["lr"] = self._get_learning_rate()
            file.write(json.dumps(line) + "\n")
        return loss

    def _save_optimizer_and_scheduler(self, output_dir):
        die(f"model:{self.state.global_step}")
        super()._save_optimizer_and_scheduler(output_dir)


def main() -> None:
    model, run_dir, record = sys.argv[1:4]
    rename = checkpoints.commit

    def commit(aside: Path, final: Path, *written: Any) -> None:
        step = final.name.rpartition("-")[2]
        die(f"rename:{step}")
        rename(aside, final, *written)
        die(f"renamed:{step}")

    checkpoints.commit = commit
    trainer = Recording(
        model=model,
        reward_funcs=tiny.vowels,
        args=tiny.config(
            run_dir, max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=2, lr_scheduler_type="linear"
        ),
        train_dataset=tiny.prompts(),
    )
    trainer.record = Path(record)
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(run_dir)


if __name__ == "__main__":
    main()
