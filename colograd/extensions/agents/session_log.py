"""`SessionLog`: records finished agent sessions of unfinished groups, so that a resumed run doesn't repeat them.

RUN/_journal/step-00000012/rank-00000.sessions     conditions, then a record per session, stored like a group of one
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from ...batch import Group, Logged, Prompt, Rollout
from ...rollout.group_records import NONSENSE, JournalError, RewardedGroup, group_bytes, group_of
from ...rollout.record_file import Record, RecordFile, read_records

SUFFIX = ".sessions"
HEAD = -1  # Position of a file's first record, which has the conditions of the sessions.
PLACE = 4  # Bytes before a session's record, which hold the session's index in its group.


class SessionLog:
    """A log of the finished agent sessions of one generation or evaluation.

    Methods raise no errors, because a missing record only means that a killed run repeats the session.

    Args:
        conditions: JSON-serializable conditions of the sessions. Files with other conditions are deleted.
    """

    def __init__(self, folder: Path, rank: int, conditions: Mapping[str, Any]) -> None:
        self._path, self._head = folder / f"rank-{rank:05d}{SUFFIX}", json.dumps(dict(conditions)).encode()
        self._file: RecordFile | None = None  # Opened when the first session ends, because most runs have no agent.
        self._found: dict[int, dict[int, bytes]] = {}  # Recorded bytes: prompt's position -> index in the group.
        for path in sorted(folder.glob(f"rank-*{SUFFIX}")):
            with contextlib.suppress(OSError):  # another rank has deleted the file
                records = read_records(path)
                if next(records, None) != Record(HEAD, self._head):
                    path.unlink()
                    continue
                for record in records:
                    of_prompt = self._found.setdefault(record.position, {})
                    of_prompt[int.from_bytes(record.content[:PLACE], "big")] = record.content[PLACE:]

    def add(self, prompt: Prompt, index: int, rollout: Rollout) -> None:
        """Write a finished session. When `add` returns, the record survives the end of the process."""
        group = Group(prompt.example, (rollout,), prompt.position)
        recorded = RewardedGroup(group, torch.zeros(1, 1), Logged({}, {}))
        with contextlib.suppress(OSError, pa.ArrowException, *NONSENSE):
            if self._file is None:
                self._file = RecordFile(self._path)
                if self._file.is_new:
                    self._file.append(Record(HEAD, self._head))
            self._file.append(Record(prompt.position, index.to_bytes(PLACE, "big") + group_bytes(recorded)))

    def recall(self, prompt: Prompt) -> dict[int, Rollout]:
        """Return a prompt's recorded sessions as rollouts, by their index in the group."""
        found = {}
        for index, content in self._found.get(prompt.position, {}).items():
            with contextlib.suppress(JournalError):  # the record belongs to a different prompt: skip it
                found[index] = group_of(content, prompt).group.rollouts[0]
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
