"""Runs on several ranks that share an engine, a policy or rows."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import launcher
import torch
from paths import SCRIPTS

TWO = {"vllm_tensor_parallel_size": 2}
# AdamW's default of 1e-8 turns the rounding of gradients near 0 into whole steps.
SETTINGS = {"adam_epsilon": 1e-4}
# Expected message for each fault of same_rollouts.py: a rank fails within a forward of the second step.
FAULTS = {
    "killed": "Rank 1",
    "inside": "no room within a layer",
    "hangs": r"Rank 1 made no progress for 1\d s \(rank_timeout\) in .*fail_inside",
    "loss": "loss of step 2, micro-batch 1 is nan",
}
FIGURES = ("loss", "entropy", "grad_norm", "reward", "num_tokens", "completions/mean_length", "train/packed_tokens")


def start(script: str, ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return launcher.run(SCRIPTS / script, *arguments, ranks=ranks)


def results(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


def run(model: Path, folder: Path, ranks: int, **changes: Any) -> list[dict]:
    done = start("same_rollouts.py", ranks, model, folder, json.dumps(changes))
    assert done.returncode == 0, done.stderr[-3000:]
    return results(folder, ranks)


def check_fault_ends_all(model: Path, folder: Path, fault: str, **changes: Any) -> None:
    done = start("same_rollouts.py", 2, model, folder, json.dumps(changes), fault)
    assert done.returncode != 0 and re.search(FAULTS[fault], done.stderr), done.stderr[-3000:]


def check_smaller_rows_where_memory_lacks_alike(model: Path, folder: Path, **changes: Any) -> None:
    """Check that two ranks that run out of memory repeat the step, and end as one rank does."""
    done = start("same_rollouts.py", 2, model, folder, json.dumps(SETTINGS | changes), "alike")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ran out of memory and is repeated" in done.stdout
    run(model, folder, 1, **SETTINGS)
    check_ends_alike(model, folder, 2)


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def check_ends_alike(model: Path, folder: Path, ranks: int) -> None:
    """Check that all ranks end within 1e-5 of the distance that one rank's weights moved."""
    from transformers import AutoModelForCausalLM

    expected = torch.load(folder / "weights0-of-1.pt")
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    moved = norm(value - before[name] for name, value in expected.items())
    for rank in range(ranks):
        found = torch.load(folder / f"weights{rank}-of-{ranks}.pt")
        assert found.keys() == expected.keys()
        assert norm(found[name] - value for name, value in expected.items()) < 1e-5 * moved


def check_adapters_end_alike(folder: Path, ranks: int, before: dict[str, torch.Tensor], of: int = 0) -> None:
    expected = {name: p for name, p in torch.load(folder / "weights0-of-1.pt").items() if "lora_" in name}
    moved = norm(value - before[name] for name, value in expected.items())
    for rank in range(ranks):
        found = torch.load(folder / f"weights{rank}-of-{of or ranks}.pt")
        assert norm(found[name] - value for name, value in expected.items()) < 1e-5 * moved
