"""An earlier run's files in the folder of a new run. They are moved together, so that no reader mixes two runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = "_earlier"  # transformers doesn't push folders with such a name to the Hub
# Entries that a run writes into its folder, except recipe.yaml: it may be the user's, and `_journal` has a copy.
RECORDS = ("_journal", "_report", "completions", "report.html", "README.md", "reward.png", "trainer_state.json")
CHECKPOINTS = ("checkpoint-*", "refused-checkpoint-*")
MODEL = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "*processor_config.json", "training_args.bin",
)  # fmt: skip
SIGNS = ("_journal/step-*", "_report/*", "trainer_state.json", *CHECKPOINTS)  # entries that show an earlier run


def set_aside(run_dir: str | Path, model: str = "") -> Path | None:
    """Move an earlier run's files to a new folder in `FOLDER`.

    Args:
        run_dir: the run's folder.
        model: the model that the new run starts from. It isn't moved.

    Returns:
        The new folder; None if there is no earlier run.
    """
    folder = Path(run_dir)
    if not any(True for sign in SIGNS for _ in folder.glob(sign)):
        return None
    base = Path(model).resolve() if model and os.path.isdir(model) else None
    patterns = (*RECORDS, *CHECKPOINTS, *(MODEL if base != folder.resolve() else ()))
    paths = dict.fromkeys(path for pattern in patterns for path in folder.glob(pattern) if path.resolve() != base)
    return move_aside(folder, [*paths])


def move_aside(run_dir: str | Path, paths: Sequence[Path]) -> Path:
    """Move entries of a run's folder to a new folder in `FOLDER`, named by the time. Return the new folder."""
    run_dir = Path(run_dir)
    name, number = time.strftime("%Y-%m-%d_%H%M%S"), 1
    while (aside := run_dir / FOLDER / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    for path in paths:
        target = aside / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside
