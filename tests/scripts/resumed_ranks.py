"""Two steps, a checkpoint, and two steps more: at once, and resumed in another way.

Started by tests/training/test_ranks.py.

    torchrun --nproc-per-node 2 resumed_ranks.py MODEL RUN_DIR OUT_FILE DTYPE STEPS SHARDING

With STEPS 2 the run ends at its checkpoint; with 4 it goes on from the one in RUN_DIR, if there is one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import tiny_images

from colograd import GRPOTrainer

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    model, run_dir, out, dtype, steps, sharding = sys.argv[1:]
    args = tiny.config(
        run_dir,
        model_init_kwargs={"dtype": dtype},
        save_strategy="steps",
        save_steps=2,
        max_steps=int(steps),
        lr_scheduler_type="constant",
        gradient_checkpointing=True,
        num_iterations=2,
        sharding=sharding,
    )
    prompts = tiny_images.prompts if Path(model, "processor_config.json").exists() else tiny.prompts
    trainer = GRPOTrainer(model, tiny.vowels, args, prompts())
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(f"{run_dir}/final")
    trainer.publish()
    result = {
        "differing": trainer.weights.differing(),
        "weights": trainer.weights.describe(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "reward" in entry],
        "way": args.sharding,
        "mismatch": trainer.state.log_history[0].get("sampling/sampling_logp_difference/max"),
    }
    Path(f"{out}-rank{RANK}.json").write_text(json.dumps(result))
    trainer.close()


if __name__ == "__main__":
    main()
