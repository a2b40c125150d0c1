"""Files with the data of a run's report. Other processes may read them while they grow.

If a write fails (the disk is full, for example), the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...rollout.record_file import Record, RecordFile

FOLDER = "_report"  # transformers pushes no folder whose name begins with _ to the Hub
EVENTS = "events.jsonl"
SAMPLES = "samples.records"
BINS = 20
PROMPT_CHARACTERS = 160


class EventLog:
    def __init__(self, run_dir: str | Path, warn: Callable[[str], None]) -> None:
        self.folder = Path(run_dir) / FOLDER
        self._warn_user, self._warned = warn, False
        self._events: Any = None
        self._samples: RecordFile | None = None

    def event(self, kind: str, **content: Any) -> None:
        line = json_line({"kind": kind, "time": round(time.time(), 3), **content})
        with self._warning():
            if self._events is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._events = open(self.folder / EVENTS, "ab", buffering=0)  # noqa: SIM115 - until `close`
                if self._events.tell():
                    self._events.write(b"\n")  # A killed run may have left an incomplete line.
            if self._events.write(line) != len(line):  # A full disk may take only a part of the line.
                raise OSError("the disk has no room for a whole line")

    def samples(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        with self._warning():
            self._samples = self._samples or RecordFile(self.folder / SAMPLES)
            self._samples.append(Record(step, json_line(completions)))

    def close(self) -> None:
        for file in filter(None, (self._events, self._samples)):
            with contextlib.suppress(OSError):  # some disks report only at `close` that they are full
                file.close()
        self._events = self._samples = None

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.warn(error)
            self.close()  # the next write opens the files again, and begins a new line

    def warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn_user(
                f"report: {FOLDER}/ can't be written ({error.strerror or error}): the run goes on, but its report will "
                "be incomplete. This warning comes only once; `report: false` turns the report off."
            )


def json_line(entry: Any) -> bytes:
    return json.dumps(plain(entry), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinity to None, arrays and sets to lists, other types to texts."""

    def convert(other: Any) -> Any:
        if isinstance(other, Mapping | set | frozenset):
            return dict(other) if isinstance(other, Mapping) else list(other)
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json.loads(json.dumps(value, default=convert, skipkeys=True), parse_constant=lambda name: None)


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, list[Any]]:
    """Return a histogram of the finite values: ``edges`` [n + 1] and ``counts`` [n], or both empty."""
    finite = np.asarray([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not finite.size:
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(finite, bins if finite.min() < finite.max() else 1)
    return {"edges": [round(edge, 6) for edge in edges.tolist()], "counts": counts.tolist()}


def events_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return a run's events in order. Events of steps after n are left out if a start or resume at step n follows."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), open(Path(run_dir) / FOLDER / EVENTS, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):  # skip damaged lines
                entry = json.loads(line)
                if entry["kind"] == "start":
                    found = [earlier for earlier in found if earlier.get("step", 0) <= entry["step"]]
                found.append(entry)
    return found


def prompt_beginning(prompt: Any) -> str:
    text = prompt_text(prompt) if isinstance(prompt, list | str) else ""
    cut = text if len(text) <= PROMPT_CHARACTERS else text[:PROMPT_CHARACTERS] + " …"
    return cut.encode(errors="replace").decode()


def prompt_text(prompt: Any, sizes: Sequence[str] = ()) -> str:
    """Return a text prompt, or the text of a prompt's last user message. Images appear as "[image 32x32]"."""
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [message for message in prompt if isinstance(message, dict)] or [{}]
    users = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    marks, before = iter([f"[image {size}]" for size in sizes]), ""
    contents = [message.get("content") for message in messages]
    parts = [[_part_text(part) for part in (each if isinstance(each, list) else [each or ""])] for each in contents]
    if len(users) == 1 and not any(part is None for of_message in parts for part in of_message):
        # TRL's rule: in prompts without image parts, images come before the first user message's text. This function
        # returns that text only if no other user message follows.
        before = "".join(marks)
    texts = ["".join(next(marks, "[image]") if part is None else part for part in of_message) for of_message in parts]
    return before + texts[users[-1] if users else -1]


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return str(part)
    return None if part.get("type") == "image" else str(part if part.get("text") is None else part["text"])
