"""Notes between ranks, for threads beside the one that trains: they can't take part in its exchanges.

They lie in the store through which the ranks found each other. One rank alone needs none.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .ranks import rank, world_size

EVERY = 0.05  # seconds between two looks

_numbers = itertools.count(1)  # of the boards of this process: all ranks make theirs in the same order


class RankNotes:
    """Where each rank leaves one note under a subject, and may read the others'."""

    def __init__(self) -> None:
        self._name = f"colograd/notes/{next(_numbers)}"
        self._own: dict[str, Any] = {}  # of one rank alone

    def leave(self, subject: str, note: Any) -> None:
        """``note``: anything that JSON can say."""
        if world_size() == 1:
            self._own[subject] = note
        else:
            self._store().set(self._key(subject, rank()), json.dumps(note))

    def read(self, subject: str, of: int, stop: Callable[[], str]) -> Any:
        """The note of rank ``of``, for which this waits until ``stop``, asked again and again, says something.

        Raises:
            RuntimeError: there is none, and ``stop`` said so.
        """
        if world_size() == 1:
            return self._own[subject]
        store, key = self._store(), self._key(subject, of)
        while not store.check([key]):  # and not `get`, which keeps the store from the thread that trains
            if why := stop():
                raise RuntimeError(f"rank {of} hasn't said that its part is written: {why}")
            time.sleep(EVERY)
        return json.loads(store.get(key))

    def clear(self, subject: str) -> None:
        if world_size() == 1:
            self._own.pop(subject, None)
        else:
            self._store().delete_key(self._key(subject, rank()))

    def _key(self, subject: str, of: int) -> str:
        return f"{self._name}/{subject}/{of}"

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()
