"""The finished sessions of unfinished groups: a killed run continues without running them again.

RUN/_journal/step-00000012/rank-00000.sessions     a head, then a record per session, each like a group of one
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
HEAD = -1  # position of a file's first record: the conditions of the sessions
PLACE = 4  # bytes before a session's record: the index of the session in its group


class SessionLog:
    """The recorded sessions of one round or evaluation.

    Methods raise no errors: a killed run would only run an unrecorded session again.

    Args:
        conditions: JSON-serializable conditions of the sessions. Files with other conditions are deleted.
    """

    def __init__(self, folder: Path, rank: int, conditions: Mapping[str, Any]) -> None:
        self._path, self._head = folder / f"rank-{rank:05d}{SUFFIX}", json.dumps(dict(conditions)).encode()
        self._file: RecordFile | None = None  # opened when the first session ends: most runs have no agent
        self._found: dict[int, dict[int, bytes]] = {}  # prompt's position -> index in the group -> bytes
        for path in sorted(folder.glob(f"rank-*{SUFFIX}")):
            with contextlib.suppress(OSError):  # another rank deleted it
                records = read_records(path)
                if next(records, None) != Record(HEAD, self._head):
                    path.unlink()
                    continue
                for record in records:
                    of_prompt = self._found.setdefault(record.position, {})
                    of_prompt[int.from_bytes(record.content[:PLACE], "big")] = record.content[PLACE:]

    def add(self, prompt: Prompt, index: int, rollout: Rollout) -> None:
        """Write a session. When this returns, the session survives the process."""
        group = Group(prompt.example, (rollout,), prompt.position)
        recorded = RewardedGroup(group, torch.zeros(1, 1), Logged({}, {}))
        with contextlib.suppress(OSError, pa.ArrowException, *NONSENSE):
            if self._file is None:
                self._file = RecordFile(self._path)
                if self._file.is_new:
                    self._file.append(Record(HEAD, self._head))
            self._file.append(Record(prompt.position, index.to_bytes(PLACE, "big") + group_bytes(recorded)))

    def recall(self, prompt: Prompt) -> dict[int, Rollout]:
        """Return a prompt's recorded sessions, by their index in the group."""
        found = {}
        for index, content in self._found.get(prompt.position, {}).items():
            with contextlib.suppress(JournalError):  # a session of another prompt
                found[index] = group_of(content, prompt).group.rollouts[0]
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
