"""The figures of optimizer steps (loss, gradient's norm) in a round's folder: lines of JSON, exact to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .step_lines import add_step, steps_in

FILE = "steps.jsonl"
LARGEST = 2**24  # maximum bytes read of the file


def note_figures(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    add_step(folder / FILE, step, figures)


def read_figures(folder: Path) -> dict[int, dict[str, float]]:
    """Return step -> the figures of the first time that the step was trained."""
    found = dict[int, dict[str, float]]()
    for step, entry in steps_in(folder / FILE, LARGEST):
        try:
            figures = {str(name): float(value) for name, value in entry.items()}
        except (ValueError, TypeError, OverflowError):
            continue
        found.setdefault(step, figures)
    return found
