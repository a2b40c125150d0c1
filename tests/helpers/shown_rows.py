"""The completions of a run as its report reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colograd.extensions.recording.event_log import FOLDER, SAMPLES, json_line
from colograd.extensions.recording.group_views import shown_completions
from colograd.rollout.record_file import Record, RecordFile, read_records


def samples_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return all completions of a run. If one was recorded twice, the later record counts."""
    path, found = Path(run_dir) / FOLDER / SAMPLES, dict[Any, dict[str, Any]]()
    for record in read_records(path) if path.is_file() else ():
        for entry in json.loads(record.content):
            key = (record.position, *(entry[name] for name in ("purpose", "position", "index")))
            found[key] = {"step": record.position, **entry}
    return list(found.values())


def sample_entries(*args: Any) -> list[dict[str, Any]]:
    """Return the entries that a report reads after `shown_completions(*args)`."""
    return json.loads(json_line(shown_completions(*args)))


def write_samples(run_dir: Path, *entries: dict[str, Any] | bytes) -> None:
    """Append completions to a run's samples: dicts with their step, or bytes as a record of step 1."""
    file = RecordFile(run_dir / FOLDER / SAMPLES)
    for entry in entries:
        is_raw = isinstance(entry, bytes)
        file.append(Record(1, entry) if is_raw else Record(entry["step"], json.dumps([entry]).encode()))
    file.close()
