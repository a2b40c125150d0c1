"""Three steps with an agent. Its sessions fail in all ways, and the last failure has to end the run.

torchrun --nproc-per-node 2 agent_faults.py MODEL OUT_DIR SETTINGS

SETTINGS is JSON: of the configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
from datasets import Dataset
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.extensions.agents import session, sessions

KINDS = [
    "fine", "hangs", "floods", "late",
    "rubbish", "fine", "dies", "exits",
    "fine", "fine", "fine", "exits",
]  # fmt: skip
GROUPS = 4  # of a step
out = Path(sys.argv[2])


class Clock(SimpleNamespace):
    """Sessions' clock."""

    ahead = 0.0  # seconds

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead


alive: list[session.Session] = []


class ImpatientSession(session.Session):
    """A session that times out when only hanging sessions are left, at any speed of the machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        alive.append(self)

    def outcome(self) -> Any:
        if all(each.prompt.example["kind"] == "hangs" for each in alive):
            clock.ahead += 1e6
        outcome = super().outcome()
        if outcome is not None:
            alive.remove(self)
        return outcome


class Strict(TrainerCallback):
    """A failing session ends the run from step 3 on, as with `agent_on_error: raise`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            source.config = SimpleNamespace(**{**vars(source.config), "agent_on_error": "raise"})


clock = Clock()
session.time = sessions.time = clock  # type: ignore[assignment]
sessions.Session = ImpatientSession  # type: ignore[misc]
rows = Dataset.from_list([{"question": f"row {i}", "kind": kind} for i, kind in enumerate(KINDS)])
given = {
    "num_generations": 4, "prompts_per_step": GROUPS, "max_completion_length": 24, "max_steps": len(KINDS) // GROUPS,
    "vllm_max_model_length": 256, "shuffle_dataset": False, "agent_on_error": "abstain", "agent_timeout": 1e5,
    "agent_requests": 30, "agent_parallel": 10,
}  # fmt: skip
trainer = GRPOTrainer(
    sys.argv[1], None, tiny.config(out / "run", **{**given, **json.loads(sys.argv[3])}), rows,
    agent=f"{sys.executable} {Path(__file__).with_name('faulty_agent.py')} {out}", callbacks=[Strict()],
)  # fmt: skip
source = trainer.sampler.source
seen = tiny.remembered_groups(trainer)
error = ""
try:
    trainer.train()
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
digest = hashlib.sha256()
for _, parameter in sorted(trainer.model.named_parameters()):
    digest.update(parameter.detach().float().cpu().numpy().tobytes())
found = {
    "step": trainer.state.global_step,
    "error": error,
    "weights": digest.hexdigest(),
    "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    "sessions": [
        {
            "row": int(group.example["question"][4:]), "kind": group.example["kind"],
            "reward": rollout.columns["agent_reward"], "failure": rollout.columns["agent_failure"],
            "answers": len(rollout.columns["session"]), "sampled": int(rollout.sampled.sum()),
        }
        for group in seen for rollout in group.rollouts
    ],
}  # fmt: skip
(out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
trainer.close()
