"""Runs on several ranks that share an engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import launcher
from paths import SCRIPTS

TWO = {"vllm_tensor_parallel_size": 2}


def start(script: str, ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return launcher.run(SCRIPTS / script, *arguments, ranks=ranks)


def results(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


def run(model: Path, folder: Path, ranks: int, **changes: Any) -> list[dict]:
    done = start("same_rollouts.py", ranks, model, folder, json.dumps(changes))
    assert done.returncode == 0, done.stderr[-3000:]
    return results(folder, ranks)
