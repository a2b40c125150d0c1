"""Write and read JSON lines files with a line per optimizer step, e.g. its exact loss and gradient norm.

A file lies in the folder of recorded rollouts that the steps train. A killed run may leave an incomplete last line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = "steps.jsonl"
LARGEST = 2**24  # maximum number of bytes that are read of `steps.jsonl`


def note_figures(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    add_step(folder / FILE, step, figures)


def read_figures(folder: Path) -> dict[int, dict[str, float]]:
    """Read `steps.jsonl`: optimizer step -> loss and gradient norm. If a step has several lines, the first counts."""
    figures_of = dict[int, dict[str, float]]()
    for step, entry in steps_in(folder / FILE, LARGEST):
        try:
            figures_of.setdefault(step, {str(name): float(value) for name, value in entry.items()})
        except (ValueError, TypeError, OverflowError):
            continue
    return figures_of


def add_step(path: Path, step: int, entry: Mapping[str, Any]) -> None:
    """Append the line of an optimizer step to a JSON lines file. Create the file if it doesn't exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # Write the newline before the line, so that an incomplete line of a killed run doesn't damage the new line.
        file.write("\n" * (file.tell() > 0) + json.dumps({"step": step, **entry}))


def steps_in(path: Path, largest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, values) for each JSON line in the file's first ``largest`` bytes. Skip incomplete lines."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(largest).splitlines()
    for line in lines:
        try:
            entry = json.loads(line)
            step = entry.pop("step")
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue
        if type(step) is int:
            yield step, entry
