"""What a run records for its report: `_report/` in its folder, two files of JSON lines that only grow.

    events.jsonl    how the run started, each step's metrics, rollouts, groups and histograms, alarms, how it ended
    samples.jsonl   a few groups of each step, token by token

Each line is whole and on its way to the disk when `write` returns, so another process can read along. A number that
isn't finite is null. What can't be written is said once, and the run goes on.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "_report"  # transformers pushes no such name to the Hub
ASIDE = "_report.old"
EVENTS, SAMPLES = "events.jsonl", "samples.jsonl"
BINS = 20  # of a histogram


class RunRecord:
    """Appends to the record of a run. One process writes it.

    Args:
        warn: is told, once, what can't be written.
    """

    def __init__(self, run_dir: str | Path, warn: Callable[[str], None]) -> None:
        self.folder = Path(run_dir) / FOLDER
        self._warn = warn
        self._told = False
        self._files: dict[str, Any] = {}

    def begin(self, step: int) -> None:
        """Go on after what is there; a run that starts at step 0 moves it aside."""
        self.close()
        if not step and self.folder.is_dir():
            try:
                aside = self.folder.with_name(ASIDE)
                shutil.rmtree(aside, ignore_errors=True)
                self.folder.rename(aside)
            except OSError as error:
                self._failed(error)

    def event(self, kind: str, **content: Any) -> None:
        """Write an event of now."""
        self.write(EVENTS, [{"kind": kind, "time": round(time.time(), 3), **content}])

    def write(self, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append each entry as a line to a file of `FOLDER`."""
        try:
            for entry in entries:
                file = self._open(name)
                if file.write(line := json_line(entry)) != len(line):  # a disk may be full in the middle of a line
                    raise OSError("no room for a whole line")
        except OSError as error:
            self._failed(error)
            self.close()  # the next line begins on a line of its own: see `_open`

    def close(self) -> None:
        """Nothing is open; the next entry opens its file again."""
        while self._files:
            _, file = self._files.popitem()
            file.close()

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / name
            torn = path.is_file() and not _ends_whole(path)
            self._files[name] = file = open(path, "ab", buffering=0)  # noqa: SIM115 - until `close`
            if torn:
                file.write(b"\n")
        return self._files[name]

    def _failed(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._warn(
                f"report: {FOLDER}/ can't be written ({error.strerror or error}): the run goes on, and its report will "
                "lack what isn't there (said once; report: false records nothing)"
            )


def _ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(0, 2)
        if not file.tell():
            return True
        file.seek(-1, 2)
        return file.read() == b"\n"


def json_line(entry: Mapping[str, Any]) -> bytes:
    """An entry as a line of UTF-8; what JSON can't say becomes null (NaN) or its text."""
    form: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    try:
        text = json.dumps(entry, **form)
    except (TypeError, ValueError):
        text = json.dumps(plain(entry), **form)
    return text.encode("utf-8", "replace") + b"\n"


def plain(value: Any) -> Any:
    """A value as JSON has it: NaN and infinities are None, what has no counterpart is its text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):  # an array or a tensor
        return plain(value.tolist())
    return str(value)


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, list[Any]]:
    """``edges`` [n + 1] and ``counts`` [n] of the finite values, in equally wide bins; both empty for none."""
    finite = np.asarray([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not finite.size:
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(finite, bins if finite.min() < finite.max() else 1)
    return {"edges": [round(edge, 6) for edge in edges.tolist()], "counts": counts.tolist()}


# -- reading


def events_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """A run's events in their order. What was recorded of steps after the one from which the run then went on is left
    out: these steps were taken again."""
    found: list[dict[str, Any]] = []
    for entry in entries(Path(run_dir) / FOLDER / EVENTS):
        if entry.get("kind") == "start":
            found = [earlier for earlier in found if _step(earlier) <= _step(entry)]
        found.append(entry)
    return found


def samples_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """A run's samples; of a completion that was recorded twice, the later one."""
    found: dict[Any, dict[str, Any]] = {}
    for entry in entries(Path(run_dir) / FOLDER / SAMPLES):
        found[tuple(str(entry.get(name)) for name in ("step", "purpose", "position", "index"))] = entry
    return list(found.values())


def _step(entry: Mapping[str, Any]) -> float:
    step = entry.get("step")
    return step if isinstance(step, int | float) else 0


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is no such line, or no file, is passed over."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, dict):
                    yield entry
    except OSError:
        return
