"""Two steps with a tool that hangs on rank 1 only. Started by tests/extensions/tools/test_environments.py.

torchrun --nproc-per-node 2 tool_ranks.py MODEL TEMPLATE OUT_DIR
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import tool_cases
from datasets import Dataset

from colograd import GRPOTrainer

CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'


def add(a: int, b: int) -> int:
    """Adds on rank 0, and never comes back on rank 1.

    Args:
        a: one number
        b: another
    """
    return tool_cases.hangs(a, b) if os.environ["RANK"] == "1" else a + b


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(messages)) % 7) for messages in completions]


def main() -> None:
    model, template, out = sys.argv[1:]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": str(i)}]} for i in range(8)])
    config = tiny.config(
        Path(out) / "run",
        num_generations=2,
        prompts_per_step=2,
        max_completion_length=230,
        max_steps=2,
        chat_template_path=template,
        vllm_structured_outputs_regex=CALL,
        vllm_importance_sampling_correction=False,
        max_tool_calling_iterations=1,
        tool_workers=2,
        tool_timeout=1.0,
    )
    trainer = GRPOTrainer(model, reward, config, rows, tools=[add])
    trainer.train()
    found = [entry for entry in trainer.state.log_history if "reward" in entry]
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    trainer.close()


if __name__ == "__main__":
    main()
