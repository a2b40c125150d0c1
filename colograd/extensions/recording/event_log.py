"""`EventLog`: writes a run's record for its report: `_report/events.jsonl` and `_report/samples.records`.

Events are the run's start and end, each step's metrics, rollouts, groups, histograms and alarms. Their file only
grows. Each event is one line, written at once, so that another process can read the file meanwhile. Numbers that
aren't finite are null. Samples are completions of some groups, token by token: compressed JSON, a record per step or
evaluation. If a file can't be written, the user gets one warning, and the run goes on.
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

FOLDER = "_report"  # in the run's folder; transformers doesn't push this name to the Hub
EVENTS = "events.jsonl"
SAMPLES = "samples.records"  # Records of `record_file`, with the optimizer step as position.
BINS = 20  # Number of bins of a histogram.
BEGINNING = 160  # Maximum characters of a prompt in an event.


class EventLog:
    """Writes a run's events and samples. The first time that a file can't be written, ``warn`` gets a line."""

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
                    self._events.write(b"\n")  # Ends an incomplete line of a killed run.
            if self._events.write(line) != len(line):  # A full disk may take only a part of the line.
                raise OSError("the disk has no room for a whole line")

    def samples(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write completions of an optimizer step that the report shows token by token."""
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
    """Encode an entry as a line of JSON in UTF-8. `plain` converts values that JSON lacks, e.g. NaN or an array."""
    return json.dumps(plain(entry), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def plain(value: Any) -> Any:
    """Convert a value for JSON. NaN and infinities become None. Arrays, tensors, tuples and sets become lists (scalars:
    numbers). Values of other types that JSON lacks become texts, and keys of such types are left out."""

    def convert(other: Any) -> Any:
        if isinstance(other, Mapping | set | frozenset):
            return dict(other) if isinstance(other, Mapping) else list(other)
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json.loads(json.dumps(value, default=convert, skipkeys=True), parse_constant=lambda name: None)


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
