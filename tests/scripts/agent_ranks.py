"""Two steps with an agent, which may kill its run. Started by tests/extensions/agents/test_runs.py.

agent_ranks.py MODEL OUT_DIR SETTINGS

SETTINGS is JSON: of the configuration, and `die_after`: after so many sessions the process kills itself (0: never).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import agent_cases
import tiny
from datasets import Dataset

from colograd import GRPOTrainer

ended = 0
lock = threading.Lock()
out = Path(sys.argv[2])
settings: dict[str, Any] = json.loads(sys.argv[3])
die_after: int = settings.pop("die_after", 0)


def agent(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Send a request, one with a shorter context, and as many more as the row's number."""
    global ended
    agent_cases.compacting(base_url, api_key, model, row)
    with agent_cases.client(base_url, api_key) as openai:
        asked = [{"role": "user", "content": row["question"]}]
        for _ in range(1 + int(row["question"][-1])):
            reply = openai.chat.completions.create(model=model, messages=asked, max_tokens=8)
    with lock:
        ended += 1
        with open(out / "ended.txt", "a") as file:
            file.write(f"{row['question']}\n")
        if ended == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    return float(len(reply.choices[0].message.content) % 5)


def main() -> None:
    rows = Dataset.from_list([{"question": f"row {i}"} for i in range(8)])
    given = {"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 24, "max_steps": 2}
    trainer = GRPOTrainer(
        sys.argv[1], None, tiny.config(out / "run", **{**given, "vllm_max_model_length": 256, **settings}), rows,
        agent=agent,
    )  # fmt: skip
    seen = tiny.remembered_groups(trainer)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    found = {
        "weights": digest.hexdigest(),
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "trained": [bool((g.advantages != 0).any()) if hasattr(g, "advantages") else None for g in seen],
        "tokens": [list(rollout.completion_ids) for g in seen for rollout in g.rollouts],
    }
    (out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    trainer.close()


if __name__ == "__main__":
    main()
