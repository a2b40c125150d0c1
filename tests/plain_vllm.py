"""vLLM without Colograd, in a process of its own: what it says of a folder that was saved."""

from __future__ import annotations

import json
from pathlib import Path

import launcher
import torch

SCRIPT = Path(__file__).parent / "scripts" / "plain_vllm.py"


def prompt_logprobs(folder: Path, ids: list[int], scratch: Path, adapter: Path | None = None) -> torch.Tensor:
    """Log-probabilities [len(ids) - 1] of a prompt's tokens."""
    given, found = scratch / "ids.json", scratch / "logprobs.json"
    given.write_text(json.dumps(ids))
    done = launcher.run(SCRIPT, folder, given, found, *([adapter] if adapter else []))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return torch.tensor(json.loads(found.read_text()))
