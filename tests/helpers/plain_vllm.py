"""vLLM without Colograd, in a process of its own, on a saved model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import launcher
import torch
from paths import SCRIPTS
from PIL import Image

SCRIPT = SCRIPTS / "plain_vllm.py"


def prompt_logprobs(
    folder: Path,
    ids: Sequence[int],
    scratch: Path,
    adapter: Path | None = None,
    pictures: Sequence[Image.Image] = (),
    dtype: str = "float32",
) -> torch.Tensor:
    """Return log-probabilities [tokens - 1] of a prompt, whose ``ids`` have a placeholder for each image."""
    given, found = scratch / "ids.json", scratch / "logprobs.json"
    given.write_text(json.dumps(list(ids)))
    files = [scratch / f"picture-{number}.png" for number in range(len(pictures))]
    for file, picture in zip(files, pictures, strict=True):
        picture.save(file)
    done = launcher.run(SCRIPT, folder, given, found, dtype, adapter or "", *files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return torch.tensor(json.loads(found.read_text()))
