"""History of completion lengths per prompt. If not all prompts fit into the engine at once, long ones start first.

A long completion that starts last is decoded alone at the end. One that starts first is decoded together with others.
This is the longest-processing-time rule of list scheduling (Graham 1969, https://doi.org/10.1137/0117039). Each request
has its own seed, so the order changes no rollout, except by a kernel's rounding in other batches (none on a CPU). A
checkpoint holds the lengths, so that a resumed run has the same batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..batch import Group, Prompt

FILE = "lengths_{rank}.json"  # file name in a checkpoint


class LengthHistory:
    """Mean completion length of each prompt in tokens, from the last time it was sampled."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}  # mean length in tokens, by `ModelInput.key`

    def add(self, prompt: Prompt, group: Group) -> None:
        lengths = [int(rollout.sampled.sum()) for rollout in group.rollouts]
        self._means[prompt.input.key] = sum(lengths) / len(lengths)

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Sort prompts by descending expected length. A new prompt has the mean of all; ties keep their order."""
        if not self._means:
            return list(prompts)
        unknown = sum(self._means.values()) / len(self._means)
        return sorted(prompts, key=lambda prompt: -self._means.get(prompt.input.key, unknown))

    def save(self, folder: str | Path, rank: int) -> None:
        Path(folder, FILE.format(rank=rank)).write_text(json.dumps(self._means))

    def load(self, folder: str | Path, rank: int) -> None:
        path = Path(folder, FILE.format(rank=rank))
        self._means = json.loads(path.read_text()) if path.is_file() else {}
