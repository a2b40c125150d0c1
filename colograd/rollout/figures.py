"""Files in a round's folder with a line of JSON per optimizer step; among them the steps' figures, exact to the bit.

The figures are loss and gradient's norm. A killed run may have torn the last line of a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = "steps.jsonl"
LARGEST = 2**24  # maximum bytes read of the file


def note_figures(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    add_step(folder / FILE, step, figures)


def read_figures(folder: Path) -> dict[int, dict[str, float]]:
    """Return step -> the figures of the first time that the step was trained."""
    figures_of = dict[int, dict[str, float]]()
    for step, entry in steps_in(folder / FILE, LARGEST):
        try:
            figures_of.setdefault(step, {str(name): float(value) for name, value in entry.items()})
        except (ValueError, TypeError, OverflowError):
            continue
    return figures_of


def add_step(path: Path, step: int, entry: Mapping[str, Any]) -> None:
    """Append a step's line to a file. Create the file if it doesn't exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # A newline first: a torn line of a killed run must not spoil this one.
        file.write("\n" * (file.tell() > 0) + json.dumps({"step": step, **entry}))


def steps_in(path: Path, largest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and entry of each line in the file's first ``largest`` bytes. Skip torn lines."""
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
