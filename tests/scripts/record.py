"""Train the tiny model and record every step; die by SIGKILL at a given moment.

Started by tests/training/test_resume.py.

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

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny

from colograd import GRPOTrainer
from colograd.checkpoint import folders


def die(moment: str) -> None:
    if len(sys.argv) > 4 and sys.argv[4] == moment:
        os.kill(os.getpid(), signal.SIGKILL)


class Recording(GRPOTrainer):
    record: Path
    groups: dict[int, list[list[int]]]  # of the step, by position

    def generate(self, prompts):
        if self.checkpointer.writer.present is not None:
            self.checkpointer.writer.present.done.wait()  # so that it is known which checkpoint is the last one
        for index, group in enumerate(super().generate(prompts)):
            if index == 1:
                die(f"rollout:{self.state.global_step + 1}")
            yield group

    def compute_advantages(self, group, rewards):
        """Also called for groups from the journal, which aren't generated again."""
        self.groups[group.position] = [list(rollout.completion_ids) for rollout in group.rollouts]
        return super().compute_advantages(group, rewards)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        step = self.state.global_step + 1
        die(f"backward:{step}")
        with self.record.open("a") as file:
            completions = [ids for position in sorted(self.groups) for ids in self.groups[position]]
            self.groups.clear()
            line = {"step": step, "loss": loss.double().item().hex(), "completions": completions}
            line["lr"] = self._get_learning_rate()
            file.write(json.dumps(line) + "\n")
        return loss

    def _save_optimizer_and_scheduler(self, output_dir):
        die(f"model:{self.state.global_step}")
        super()._save_optimizer_and_scheduler(output_dir)


def main() -> None:
    model, run_dir, record = sys.argv[1:4]
    rename = folders.commit

    def commit(aside: Path, final: Path, *written: Any) -> None:
        step = final.name.rpartition("-")[2]
        die(f"rename:{step}")
        rename(aside, final, *written)
        die(f"renamed:{step}")

    folders.commit = commit
    trainer = Recording(
        model=model,
        reward_funcs=tiny.vowels,
        args=tiny.config(
            run_dir,
            max_steps=6,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            lr_scheduler_type="linear",
            **tiny.ONE_BY_ONE,
        ),
        train_dataset=tiny.prompts(),
    )
    trainer.record, trainer.groups = Path(record), {}
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(run_dir)


if __name__ == "__main__":
    main()
