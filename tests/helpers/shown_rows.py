"""The completions that a run shows token by token, as its report reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.apps.report.samples import Samples
from colograd.batch import ScoredGroup
from colograd.extensions.recording.group_views import shown_notes
from colograd.extensions.recording.shown import entries, shown
from colograd.rollout.group_records import RewardedGroup, group_bytes
from colograd.rollout.record_file import RecordFile, read_records
from colograd.rollout.store import ABOUT


def samples_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """All of a run; of a completion that was recorded twice, the later one."""
    samples = Samples(Path(run_dir))
    samples.refresh(1)
    found: dict[Any, dict[str, Any]] = {}
    for step, names in samples.stored.items():
        for name in sorted(names, reverse=True):
            with open(Path(run_dir) / name, "rb") as file:
                for entry in shown(file, step):
                    found[tuple(entry[name] for name in ("step", "purpose", "position", "index"))] = entry
    return list(found.values())


def sample_entries(groups: Sequence[tuple[ScoredGroup, Sequence[float]]], *args: Any) -> list[dict[str, Any]]:
    """Entries that a store reads after `shown_notes(groups, *args)`."""
    notes = json.loads(json.dumps(shown_notes(groups, *args)))
    recorded = [RewardedGroup(scored.group, scored.rewards, scored.logged) for scored, _ in groups]
    return list(entries(notes, {each.group.position: group_bytes(each) for each in recorded}))


def as_before_training(path: Path) -> None:
    """Take the notes out of a rank's file of a round."""
    records = [record for record in read_records(path) if record.position >= ABOUT]
    path.unlink()
    file = RecordFile(path)
    for record in records:
        file.append(record)
    file.close()
