"""Notes between ranks, for threads other than the training thread: they can't take part in its collectives.

Notes are stored in the process group's rendezvous store. A run with one rank keeps them in a dict.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .ranks import rank, world_size

EVERY = 0.05  # seconds between two reads of the store

_numbers = itertools.count(1)  # one per `RankNotes`; all ranks create them in the same order


class RankNotes:
    """A notice board: each rank leaves one note per subject and reads the notes of others."""

    def __init__(self) -> None:
        self._name = f"colograd/notes/{next(_numbers)}"
        self._local: dict[str, Any] = {}  # the notes of a run with one rank

    def leave(self, subject: str, note: Any) -> None:
        """Write this rank's note, any JSON value, under a subject."""
        if world_size() == 1:
            self._local[subject] = note
        else:
            self._store().set(self._key(subject, rank()), json.dumps(note))

    def read(self, subject: str, of: int, stop: Callable[[], str]) -> Any:
        """Wait for a rank's note and return it.

        Args:
            subject: the note's subject.
            of: the rank that writes the note.
            stop: is called repeatedly; a text that isn't empty ends the wait, and is its reason.

        Raises:
            RuntimeError: ``stop`` returned a reason before the note was there.
        """
        if world_size() == 1:
            return self._local[subject]
        store, key = self._store(), self._key(subject, of)
        while not store.check([key]):  # not `get`, which would block the store for the training thread
            if reason := stop():
                raise RuntimeError(f"rank {of} hasn't reported that its part is written: {reason}")
            time.sleep(EVERY)
        return json.loads(store.get(key))

    def clear(self, subject: str) -> None:
        """Delete this rank's note of a subject."""
        if world_size() == 1:
            self._local.pop(subject, None)
        else:
            self._store().delete_key(self._key(subject, rank()))

    def _key(self, subject: str, of: int) -> str:
        return f"{self._name}/{subject}/{of}"

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()
