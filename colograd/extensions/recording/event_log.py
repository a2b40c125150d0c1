"""`EventLog`: writes a run's events for its report to `_report/events.jsonl` in the run's folder.

Events are the run's start and end, each step's metrics, rollouts, groups, histograms and alarms. The file only grows.
Each event is one line, written at once, so that another process can read the file meanwhile. Numbers that aren't finite
are null. If the file can't be written, the user gets one warning, and the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "_report"  # in the run's folder; transformers doesn't push this name to the Hub
EVENTS = "events.jsonl"
BINS = 20  # Number of bins of a histogram.
BEGINNING = 160  # Maximum characters of a prompt in an event.


class EventLog:
    """Writes a run's events. The first time that the file can't be written, ``warn`` gets a line for the user."""

    def __init__(self, run_dir: str | Path, warn: Callable[[str], None]) -> None:
        self.folder = Path(run_dir) / FOLDER
        self._warn_user = warn
        self._warned = False
        self._file: Any = None

    def event(self, kind: str, **content: Any) -> None:
        line = json_line({"kind": kind, "time": round(time.time(), 3), **content})
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = open(self.folder / EVENTS, "a+b", buffering=0)  # noqa: SIM115 - until `close`
                if end := self._file.seek(0, 2):
                    self._file.seek(end - 1)
                    if self._file.read() != b"\n":  # the file's last line is incomplete
                        self._file.write(b"\n")
            if self._file.write(line) != len(line):  # a full disk may take only a part of the line
                raise OSError("the disk has no room for a whole line")
        except OSError as error:
            self.warn(error)
            self.close()  # the next event begins a new line behind the incomplete line

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # some disks report only at `close` that they are full
                self._file.close()
            self._file = None

    def warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn_user(
                f"report: {FOLDER}/ can't be written ({error.strerror or error}): the run goes on, but its report will "
                "be incomplete. This warning comes only once; `report: false` turns the report off."
            )


def json_line(entry: Mapping[str, Any]) -> bytes:
    """Encode an entry as a line of JSON in UTF-8. `plain` converts values that JSON lacks, e.g. NaN or an array."""
    return json.dumps(plain(entry), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def plain(value: Any) -> Any:
    """Convert a value for JSON. NaN and infinities become None. Arrays, tensors, tuples and sets become lists (scalars:
    numbers). Values of other types that JSON lacks become texts."""

    def convert(other: Any) -> Any:
        if isinstance(other, Mapping | set | frozenset):
            return dict(other) if isinstance(other, Mapping) else list(other)
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json.loads(json.dumps(value, default=convert), parse_constant=lambda name: None)


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, list[Any]]:
    """Return ``edges`` [n + 1] and ``counts`` [n]: one bin for equal values, empty lists without finite values."""
    finite = np.asarray([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not finite.size:
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(finite, bins if finite.min() < finite.max() else 1)
    return {"edges": [round(edge, 6) for edge in edges.tolist()], "counts": counts.tolist()}


def events_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return a run's events in order, without earlier events of the steps that a resumed run trained again."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), open(Path(run_dir) / FOLDER / EVENTS, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):  # skip what isn't an event
                entry = json.loads(line)
                if entry["kind"] == "start":
                    found = [earlier for earlier in found if earlier.get("step", 0) <= entry["step"]]
                found.append(entry)
    return found


def prompt_beginning(prompt: Any) -> str:
    """Return the beginning of `prompt_text`. Return "" if the prompt is neither a text nor a list of messages."""
    text = prompt_text(prompt) if isinstance(prompt, list | str) else ""
    cut = text if len(text) <= BEGINNING else text[:BEGINNING] + " …"
    return cut.encode(errors="replace").decode()


def prompt_text(prompt: Any, sizes: Sequence[str] = ()) -> str:
    """Return a prompt's text: of its last user message, else of its last message. Images appear as "[image 32x32]"."""
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [message for message in prompt if isinstance(message, dict)] or [{}]
    users = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    marks, before = iter([f"[image {size}]" for size in sizes]), ""
    contents = [message.get("content") for message in messages]
    # The parts of each message's content: a text, or None for an image.
    parts = [[_part_text(part) for part in (each if isinstance(each, list) else [each or ""])] for each in contents]
    if len(users) == 1 and not any(part is None for of_message in parts for part in of_message):
        before = "".join(marks)  # without image parts all images go before the only user message, as in TRL
    texts = ["".join(next(marks, "[image]") if part is None else part for part in of_message) for of_message in parts]
    return before + texts[users[-1] if users else -1]


def _part_text(part: Any) -> str | None:
    """Return the text of one content part of a message, or None for an image."""
    if not isinstance(part, dict):
        return str(part)
    return None if part.get("type") == "image" else str(part if part.get("text") is None else part["text"])
