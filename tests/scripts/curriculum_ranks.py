"""Six steps with a curriculum, then the last three again from the checkpoint between them.

Started by tests/extensions/curriculum/test_curriculum_resume.py.

    python curriculum_ranks.py MODEL FOLDER        (or by torchrun)
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny

from colograd import GRPOTrainer

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CURRICULUM: dict[str, Any] = {
    "pass_threshold": 0.5, "solved_at": 0.5, "revisit_after": 1, "shares": {"new": 0.5, "hard": {0: 1, 6: 0.1}},
}  # fmt: skip


def train(model: str, folder: Path, checkpoint: str | None) -> dict[str, Any]:
    args = tiny.config(
        folder, max_steps=6, prompts_per_step=2, save_strategy="steps", save_steps=3, lr_scheduler_type="constant",
        curriculum=CURRICULUM, **tiny.ONE_BY_ONE,
    )  # fmt: skip
    trainer = GRPOTrainer(model, tiny.vowels, args, tiny.prompts(8))
    seen = tiny.remembered_groups(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    logged = [entry for entry in trainer.state.log_history if "curriculum/resting" in entry]
    result = {
        "drawn": sorted((group.position, group.example["prompt"][0]["content"]) for group in seen),
        "tokens": sorted((group.position, [list(r.completion_ids) for r in group.rollouts]) for group in seen),
        "weights": digest.hexdigest(),
        "record": trainer.train_prompts.choice.saved,
        "resting": [entry["curriculum/resting"] for entry in logged],
    }
    trainer.close()
    return result


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    runs = [train(model, folder / "whole", None)]
    runs.append(train(model, folder / "resumed", str(folder / "whole" / "checkpoint-3")))
    (folder / f"rank{RANK}-of-{RANKS}.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
