"""Train on rollouts that are the same for every caller, and write the policy's results.

    torchrun --nproc-per-node 2 same_rollouts.py MODEL OUT_DIR '{"vllm_tensor_parallel_size": 2}' [FAULT]

Started by tests/extensions/tensor_parallel/test_tensor_parallel.py. The third argument changes the configuration, and
`{"lora": true}` trains an adapter, `{"sampled": true}` trains completions of the engine, `{"resume": FOLDER}` goes on
from a checkpoint. After training, each rank's weights are compared with its engine's, and the sampler's
log-probabilities of new completions with the trainer's.
FAULT: `reward` (rank 0's raises in the second step), `loss` (a NaN on the last rank), `memory` (the last rank runs out
of it above 100 tokens); in the midst of a forward of the second step: `killed` (the last rank is), `inside` (it runs
out of memory), `alike` (all ranks do), `hangs` (the last rank does).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import tiny_images
import torch
from fixed_rollouts import STEPS, Rollouts
from peft import LoraConfig

from colograd import GRPOTrainer
from colograd.batch import ScoredGroup
from colograd.engine.sampling import Sampling
from colograd.parallel.ranks import gather
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import pack

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAULT = sys.argv[4] if len(sys.argv) > 4 else ""
CALLED: list[int] = []  # completions of each call of the reward on this rank
FAILED: list[str] = []


def reward(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
    CALLED.append(len(completions))
    if FAULT == "reward" and trainer_state.global_step == 1:
        raise RuntimeError(f"the judge of rank {RANK} is out")
    return tiny.vowels(completions)


def fail_inside() -> None:
    """Once, on the last rank or on all."""
    if FAILED or (FAULT != "alike" and RANK != RANKS - 1):
        return
    FAILED.append(FAULT)
    if FAULT == "hangs":
        time.sleep(tiny.PATIENCE)
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise torch.OutOfMemoryError("no room within a layer")


class Watching(GRPOTrainer):
    trained = 0  # completions that this rank trained on

    def publish(self) -> None:
        super().publish()
        assert self.weights.differing() == []

    def compute_loss(self, model: Any, micro_batch: Any, **kwargs: Any) -> Any:
        if FAULT in ("killed", "inside", "alike", "hangs") and self.state.global_step == 1 and not FAILED:
            layer = model.model.layers[1].mlp
            layer.register_forward_pre_hook(lambda *_: fail_inside())
        output = super().compute_loss(model, micro_batch)
        self.trained += micro_batch.num_sequences
        if FAULT == "loss" and RANK == RANKS - 1 and self.state.global_step == 1:
            output.loss.data.fill_(float("nan"))
        if FAULT == "memory" and RANK == RANKS - 1 and micro_batch.input_ids.numel() > 100:
            raise torch.OutOfMemoryError("the last rank has no room")
        return output


def parity(trainer: GRPOTrainer) -> tuple[float, list[list[int]]]:
    """The largest difference between the sampler's and the trainer's log-probabilities, of all engines' completions;
    and those."""
    sampling = Sampling.for_training(trainer.args)
    prompts = trainer.train_prompts.prompts()[:4]

    def sample() -> Any:
        return [*trainer.engine.generate(prompts, sampling, version=trainer.state.global_step, seed=5)]

    groups: list[Any] = [group for part in gather(trainer.engine.on_engine_leader(sample, others=[])) for group in part]
    scored = [ScoredGroup(g, torch.zeros(len(g.rollouts), 1), torch.ones(len(g.rollouts))) for g in groups]
    worst = 0.0
    for row in pack(scored, 4096, False, torch.device("cpu")):
        with torch.no_grad():
            logprobs, _ = policy_logprobs(trainer.model, row, 1.0)
        worst = max(worst, float((logprobs - row.sampler_logprobs).abs().max()))
    return worst, [list(rollout.completion_ids) for group in groups for rollout in group.rollouts]


def main() -> None:
    model, out_dir, changes = sys.argv[1:4]
    settings = {"max_steps": STEPS, "prompts_per_step": 8, "save_strategy": "steps", "save_steps": 3}
    settings |= json.loads(changes)
    adapter = LoraConfig(r=4, target_modules="all-linear") if settings.pop("lora", False) else None
    rollouts, resumed = None if settings.pop("sampled", False) else Rollouts(), settings.pop("resume", None)
    config = tiny.config(Path(out_dir) / f"run-{RANKS}", **settings)
    prompts = tiny_images.prompts if Path(model, "processor_config.json").exists() else tiny.prompts
    trainer = Watching(model, reward, config, prompts(), prompts(5), rollout_func=rollouts, peft_config=adapter)
    if FAULT == "hangs":
        vars(trainer.args)["rank_timeout"] = 15.0  # the start may take longer on a busy machine
    trainer.train(resume_from_checkpoint=resumed)
    trainer.publish()
    worst, completions = parity(trainer)
    slices = getattr(getattr(trainer.weights, "base", trainer.weights), "shared", ())  # below an adapter its base's
    result = {
        "node": config.layout.node,
        "shared": sum(part.source.data_ptr() == part.destination.data_ptr() for part in slices),
        "parameters": len([*trainer.model.parameters()]) - len(getattr(trainer.weights, "slots", ())),
        "policy": sum(p.nbytes for p in trainer.model.parameters()),
        "state": sum(v.nbytes for s in trainer.optimizer.state.values() for v in s.values() if v.numel() > 1),
        "parity": worst,
        "completions": completions,
        "asked": [[step, sorted(texts)] for step, texts in (rollouts.asked if rollouts else ())],
        "called": sum(CALLED),
        "trained": trainer.trained,
        "logs": [entry for entry in trainer.state.log_history if "grad_norm" in entry],
        "engine": trainer.engine.weight_bytes,
        "weights": trainer.weights.describe(),
        "counted": trainer.evaluate()["eval_completions"],
    }
    weights = trainer.sharding.state_dict(keep=True) or trainer.model.state_dict()
    torch.save(weights, Path(out_dir, f"weights{RANK}-of-{RANKS}.pt"))
    Path(out_dir, f"rank{RANK}-of-{RANKS}.json").write_text(json.dumps(result))
    trainer.close()


if __name__ == "__main__":
    main()
