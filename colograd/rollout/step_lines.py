"""What a round's folder keeps of optimizer steps: lines of JSON, of which a killed run may have torn the last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def add_step(path: Path, step: int, entry: Mapping[str, Any]) -> None:
    """Append a step's line to a file that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # A torn line of a run that was killed must not take this one with it.
        file.write("\n" * (file.tell() > 0) + json.dumps({"step": step, **entry}))


def steps_in(path: Path, largest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's step and its entry, of the file's first ``largest`` bytes; torn lines are passed over."""
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
