"""The figures of optimizer steps (loss, gradient's norm) in a round's folder: lines of JSON, exact to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "steps.jsonl"
LARGEST = 2**24  # bytes that are read


def note_figures(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "a", encoding="utf-8") as file:
        # A torn line of a run that was killed must not take this one with it.
        file.write("\n" * (file.tell() > 0) + json.dumps({"step": step, **figures}))


def read_figures(folder: Path) -> dict[int, dict[str, float]]:
    """step -> its figures, of the first time that it was trained. Torn lines are passed over."""
    path, found = folder / FILE, dict[int, dict[str, float]]()
    if not path.is_file():
        return found
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(LARGEST).splitlines()
    for line in lines:
        try:
            entry = json.loads(line)
            step = entry.pop("step")
            figures = {str(name): float(value) for name, value in entry.items()}
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            continue
        if type(step) is int:
            found.setdefault(step, figures)
    return found
