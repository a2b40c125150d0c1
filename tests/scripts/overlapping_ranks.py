"""Train the tiny model with and without `overlap`. Ranks of the second engine sample longest.

Started by tests/extensions/overlap/test_overlap.py under torchrun.

    torchrun --nproc-per-node 2 overlapping_ranks.py MODEL FOLDER MODE

MODE: `compare` trains overlapped, not overlapped, and replays the first run; so do `optimizer`, with the optimizer's
state shared out, `host`, with sums of gradients in host memory too, `lora`, `experts`; `engines`, on four ranks with
engines of two; `dynamic`, `gradients` and `fsdp`, where nothing is trained early.
`kill`: a rank is killed while it trains one of the second engine's groups in the third step; `resume` goes on after it,
and replays the whole run. `memory`: it runs out of memory there in the second step, and all is replayed. `reward`:
the second engine's reward raises after it.

Nothing depends on speed: the second engine samples its last group when another's rank has trained one of its groups,
where one may.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import torch

from colograd import GRPOTrainer
from colograd.apps.replaying.replayer import Replay, Replayer
from colograd.batch import Group, Prompt
from colograd.config import GRPOConfig
from colograd.extensions.overlap.rounds import read_partition

RANK = int(os.environ.get("RANK", "0"))
MODEL, FOLDER = sys.argv[1], Path(sys.argv[2])
MODE = sys.argv[3]
STEPS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "compare": {},
    "optimizer": {"sharding": "optimizer"},
    "host": {"sharding": "optimizer", "offload_gradients": True, "optim": "adamw_split"},
    "lora": {},
    "experts": {"router_aux_loss_coef": 0.0},
    "gradients": {"sharding": "gradients"},
    "fsdp": {"sharding": "fsdp"},
    "dynamic": {"dynamic_sampling": True},
    "engines": {"sharding": "optimizer", "vllm_tensor_parallel_size": 2},
}
if MODE == "host":  # a run on a CPU offloads nothing, so the check for a CPU is switched off
    GRPOConfig.offloads_gradients = property(lambda self: self.offload_gradients)
PROMPTS = 8  # of a step: the second half is the second engine's
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
IS_LONG = RANKS // 2 <= RANK


class Events:
    """Events with their times, by the clock that all ranks of a machine share."""

    def __init__(self, run: Path) -> None:
        self.run, self.kept = run, list[list[Any]]()

    def add(self, step: int, what: str, *positions: int) -> None:
        self.kept.append([time.monotonic(), RANK, step, what, sorted(positions)])

    def trained_elsewhere(self, step: int) -> Path:
        return self.run / f"trained-{step}"


class OneByOne:
    """A rollout source that samples one prompt after the other, of 12 tokens in the second engine and else of 3."""

    waits: bool

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(
        self, prompts: Sequence[Prompt], sampling: Any, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        sampling = dataclasses.replace(sampling, max_tokens=12 if IS_LONG else 3)
        for index, prompt in enumerate(prompts):
            if index + 1 == len(prompts) and self.waits and IS_LONG:
                wait_for(self.engine, events.trained_elsewhere(version))
            yield from self.engine.generate([prompt], sampling, version=version, seed=seed, purpose=purpose)
            events.add(version, "sampled", prompt.position)


def wait_for(engine: Any, note: Path) -> None:
    """Call the engine's listeners until the file ``note`` exists, like a slow step of the engine."""
    while not note.exists():
        time.sleep(0.01)
        for listener in engine.after_step:
            listener()


def reward(completions: list[Any], **columns: Any) -> list[float]:
    if MODE == "reward" and IS_LONG and events.trained_elsewhere(1).exists():
        raise RuntimeError("the judge of rank 1 is out")
    return tiny.vowels(completions)


SETTINGS: dict[str, Any] = {
    "prompts_per_step": PROMPTS,
    "max_steps": STEPS,
    "journal": "keep",
    "save_strategy": "steps",
    "save_steps": 1,
    "beta": 0.05,
    "max_tokens_per_microbatch": 120,
    "lr_scheduler_type": "constant",
    **VARIANTS.get(MODE, {}),
}


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if MODE == "lora" else None


def watch(trainer: Any) -> None:
    """Record early training, and fail there in modes with a fault."""
    learner, own = trainer.learner, trainer.round
    train, row_loss = own.train_rows, learner.row_loss

    def noting(rows: Any, metrics: Any) -> Any:
        positions = {identity.position for row in rows for identity in row.rollouts}
        foreign = not IS_LONG and any(position % PROMPTS >= PROMPTS // 2 for position in positions)
        note = events.trained_elsewhere(trainer.state.global_step) if foreign else None
        step = trainer.state.global_step
        if note and MODE == "kill" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        out_of_memory.append(note and MODE == "memory" and step == 1)
        try:
            trained = train(rows, metrics)
        finally:
            out_of_memory.clear()
            if note:
                note.touch()
        events.add(step, "trained", *positions)
        return trained

    def loss() -> Any:
        def of_row(row: Any) -> Any:
            if any(out_of_memory):
                raise torch.OutOfMemoryError("rank 0 has no room")
            return compute(row)

        compute = row_loss()
        return of_row

    out_of_memory: list[bool] = []
    own.train_rows, learner.row_loss = noting, loss


def trained(run: Path, overlap: str) -> dict[str, Any]:
    global events
    events = Events(run)
    args = tiny.config(run, overlap=overlap, **SETTINGS)
    trainer = GRPOTrainer(MODEL, reward, args, tiny.prompts(16), rollout_func=OneByOne, peft_config=adapter())
    OneByOne.waits = getattr(trainer.round, "finished", None) is not None
    if OneByOne.waits:
        watch(trainer)
    trainer.train(resume_from_checkpoint="auto" if MODE == "resume" else None)
    whole = trainer.sharding.state_dict(keep=True) or trainer.model.state_dict()
    weights = {name: value.detach().clone() for name, value in whole.items()}
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    trainer.close()
    torch.save(weights, FOLDER / f"{run.name}-rank{RANK}.pt")
    return {
        "events": events.kept,
        "steps": steps,
        "partition": [read_partition(run / "_journal" / f"step-{step:08d}", step + 1) for step in range(STEPS)],
    }


def replayed(run: Path) -> dict[str, Any]:
    lines: list[str] = []
    trainer = Replayer(
        replay=Replay(run, 1, STEPS),
        model=MODEL,
        reward_funcs=reward,
        args=tiny.config(run.with_name("replayed"), **SETTINGS | {"save_strategy": "no", "report": False}),
        train_dataset=tiny.prompts(16),
        peft_config=adapter(),
    )
    say, trainer.console.say = trainer.console.say, lambda line, *args: (lines.append(line), say(line, *args))
    trainer.train()
    trainer.close()
    return {"lines": lines}


events = Events(FOLDER)


def main() -> None:
    run = FOLDER / "overlapped"
    result = {"overlapped": trained(run, "auto")}
    if MODE in VARIANTS:
        result["apart"] = trained(FOLDER / "apart", "off")
    if MODE in VARIANTS or MODE in ("resume", "memory"):
        result["replayed"] = replayed(run)
    (FOLDER / f"{MODE}-rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
