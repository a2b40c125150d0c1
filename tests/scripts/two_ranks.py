"""Train the tiny model on several ranks and write each rank's observations.

Started by tests/training/test_ranks.py under torchrun.

    torchrun --nproc-per-node 2 two_ranks.py MODEL RUN_DIR OUT_DIR DTYPE [FAULT [SHARDING]]

FAULT: `reward` (a reward that raises on rank 1 only), `loss` (a NaN loss on rank 1 only), `memory` (rank 1 runs out of
memory above 100 tokens), `backward` (a backward of rank 1 fails half-way); on rank 1 a reward that never returns in a
worker (`hangs`) or in the trainer's process (`stuck`), or that ends its worker (`dies`). `exchange`, no fault, adds
what ranks have to agree on further, and so does `memory`: advantages scaled over the step, and a reference that follows
the policy; `reference` adds one that doesn't. No faults either: `look`, tools that show pictures; `some`, pictures in
one of four prompts; `frozen`, those with a tower that isn't trained, and a reference. `tower`: rank 1's tower fails.
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

import picture_tools
import tiny
import tiny_images
import tool_cases
import torch
from datasets import Dataset

from colograd import GRPOTrainer

RANK = int(os.environ.get("RANK", "0"))
TRAFFIC = ("reduced", "gathered", "published")
FAULT = sys.argv[5] if len(sys.argv) > 5 else ""
SHARDING = sys.argv[6] if len(sys.argv) > 6 else "none"


EXCHANGE = {"scale_rewards": "batch", "beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "exchange": EXCHANGE,
    "memory": EXCHANGE,
    "reference": {name: EXCHANGE[name] for name in ("scale_rewards", "beta")},
    "hangs": {"reward_workers": 1, "reward_timeout": 2.0, "max_steps": 1},
    "stuck": {"reward_timeout": 5.0},
    "dies": {"reward_workers": 1},
    "frozen": {"freeze_vision_tower": True, "beta": 0.05, "gradient_checkpointing": True},
    "look": {**picture_tools.SETTINGS, "max_tool_calling_iterations": 1},
}


def reward(completions, **kwargs):
    is_trained = kwargs["trainer_state"].global_step == 0  # in "hangs" an evaluation follows its only step
    if FAULT in ("hangs", "stuck") and RANK == 1 and is_trained:
        while True:
            pass
    if FAULT == "never" and RANK == 1:
        time.sleep(600)
    if FAULT == "dies" and RANK == 1:
        os._exit(9)
    if FAULT == "reward" and RANK == 1:
        raise RuntimeError("the judge of rank 1 is out")
    if FAULT == "look":  # rank 1 has nothing to train on, and so gets something
        calls = [str(messages[0].get("tool_calls")) for messages in completions]
        return [0.0 if RANK == 1 else float(sum(map(ord, call)) % 7) for call in calls]
    return tiny.vowels(completions)


def digest(model) -> str:
    """Return a digest of the whole weights. A collective if each rank has some rows."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = getattr(parameter, "full_tensor", lambda kept=parameter: kept)()
        found.update(whole.detach().float().numpy().tobytes())
    return found.hexdigest()


def fail_in_backward(model) -> None:
    """Once the gradients of the last layer are made."""

    def fail(*_) -> None:
        raise RuntimeError("a kernel of rank 1 failed")

    model.model.layers[0].register_full_backward_pre_hook(fail)


def raise_in(model) -> None:
    """In the middle of the tower's forward."""
    from colograd.extensions.images.towers import tower_layers

    def fail(*_) -> None:
        hook.remove()
        raise RuntimeError("the tower of rank 1 failed")

    hook = tower_layers(model)[1].register_forward_pre_hook(fail)


class Watching(GRPOTrainer):
    def __init__(self, *args, **kwargs) -> None:
        self.seen: list[dict] = []
        self.pictures: list[int] = []  # that were trained on, of each step
        super().__init__(*args, **kwargs)

    def publish(self) -> None:
        super().publish()
        self.pictures.append(0)
        self.seen.append(
            {"version": self.engine.version, "differing": self.weights.differing(), "weights": digest(self.model)}
        )
        for second in self.learner.second_models.values():
            self.seen[-1]["reference"] = digest(second.model)

    def generate(self, prompts):
        groups = []
        for group in super().generate(prompts):
            groups.append(group)
            yield group
        self.seen[-1]["completions"] = {g.position: [list(r.completion_ids) for r in g.rollouts] for g in groups}

    def compute_loss(self, model, micro_batch, **kwargs):
        if FAULT == "tower" and RANK == 1 and self.state.global_step == 1:
            raise_in(model)
        output = super().compute_loss(model, micro_batch)
        self.pictures[-1] += len(micro_batch.media or ())
        if FAULT == "loss" and RANK == 1 and self.state.global_step == 1:
            output.loss.data.fill_(float("nan"))
        if FAULT == "backward" and RANK == 1 and self.state.global_step == 1:
            fail_in_backward(model)
        if FAULT == "memory" and RANK == 1 and micro_batch.input_ids.numel() > 100:
            raise torch.OutOfMemoryError("rank 1 has no room")
        return output


def in_some(size: int):
    """Return prompts. Every fourth has a picture."""
    rows = enumerate(tiny_images.prompts(size))
    return Dataset.from_list([row | {"images": row["images"][: index % 4 == 0]} for index, row in rows])


def main() -> None:
    model, run_dir, out_dir, dtype = sys.argv[1:5]
    prompts = tiny_images.prompts if Path(model, "processor_config.json").exists() else tiny.prompts
    prompts = {"look": picture_tools.rows, **dict.fromkeys(("some", "frozen", "tower"), in_some)}.get(FAULT, prompts)
    trainer = Watching(
        model=model,
        reward_funcs=reward,
        args=tiny.config(
            run_dir,
            model_init_kwargs={"dtype": dtype},
            save_strategy="steps",
            save_steps=3,
            sharding=SHARDING,
            **{"max_steps": 3, **SETTINGS.get(FAULT, {})},
        ),
        train_dataset=prompts(16),
        eval_dataset=prompts(5),
        tools=[picture_tools.look, tool_cases.add] if FAULT == "look" else None,
    )
    if FAULT == "never":
        vars(trainer.args)["rank_timeout"] = 15.0  # the start may take longer on a busy machine
    trainer.train()
    trainer.save_model(f"{run_dir}/final")
    trainer.publish()
    metrics = trainer.evaluate()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    slices = getattr(trainer.weights, "shared", ())
    shared = [part.source.data_ptr() == part.destination.data_ptr() for part in slices]
    result = {
        "seen": trainer.seen,
        "shared": all(shared) and len(shared) == len(list(trainer.model.parameters())),
        "bytes": sum(p.nbytes for p in trainer.model.parameters()),
        "traffic": {name: [step[f"sync/{name}_bytes"] for step in steps] for name in TRAFFIC},
        "pictures": trainer.pictures,
        "mismatch": [step["sampling/sampling_logp_difference/mean"] for step in steps],
        "eval": metrics["eval_reward"],
        "count": metrics["eval_completions"],
        "moved": sum(step["train/moved_groups"] for step in steps),
        "losses": [step["loss"] for step in steps],
        "abstained": [step["rewards/reward/abstained"] for step in steps],
        "timeouts": [step.get("rewards/reward/timeouts", 0) for step in steps],
    }
    Path(out_dir, f"rank{RANK}-of-{os.environ.get('WORLD_SIZE', '1')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
