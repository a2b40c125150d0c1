"""A checkpoint's way to the disk, beside the training: one at a time, whole or not there, on all ranks alike.

A rank hands over its files, as images in memory or as files that lie ready, and a thread writes them. The rank that
leads (or of each node the one that does) waits for the others' notes, then writes the manifest and gives the folder its
name. What became of it the ranks tell each other at the end of a step, where they meet anyway.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..parallel.rank_notes import RankNotes
from ..parallel.ranks import rank, time_limit, world_size
from . import folders, manifest
from .host_files import Image, write_bytes, write_image
from .manifest import Entry

ALONE = 5.0  # seconds that are left to other ranks where this one ends by an error
LONGEST = 900.0  # seconds that the end of a run waits for a save
EVERY = 30.0  # seconds between two lines about a save that is waited for

Source = Image | bytes | Path  # a file's content, or a file that is moved


class PartFailed(RuntimeError):
    """A rank couldn't write its part: its error's name and text."""


@dataclass
class Save:
    """One checkpoint on its way."""

    step: int
    final: Path
    aside: Path
    sources: Mapping[str, Source]  # this rank's files, by path in the checkpoint
    leads: bool
    leaders: Sequence[int]  # ranks that lead; several where nodes share no file system
    members: Sequence[int]  # ranks whose files come into this folder
    afterwards: Callable[[], None]  # in the thread of a rank that leads, when every folder is there
    keeps_old: bool = False  # the folder that has the name now is damaged, and stays under another
    started: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    ended: float = 0.0
    processor: float = 0.0  # seconds that the thread took of one
    error: str = ""

    @property
    def seconds(self) -> float:
        """Since it was begun, or that it took."""
        return (self.ended or time.monotonic()) - self.started


class Writer:
    """The saves of a run, of which at most one is under way."""

    def __init__(self) -> None:
        self.present: Save | None = None
        self._board = RankNotes()
        self._count = 0
        self._left: list[str] = []  # subjects of this rank's notes
        self._gives_up_at = float("inf")

    @property
    def number(self) -> int:
        """Of the next one: names what belongs to it."""
        return self._count + 1

    def begin(self, save: Save, in_background: bool) -> None:
        """Write it: beside what comes next, or now."""
        self._count += 1
        self.present, self._gives_up_at = save, float("inf")
        for subject in self._left:  # which all have read, or never will
            self._board.clear(subject)
        self._left = []
        if in_background:
            threading.Thread(target=self._run, args=(save, self._count), name="colograd-save", daemon=True).start()
        else:
            self._run(save, self._count)

    def state(self) -> str | None:
        """What became of this rank's part of the present save: an error, "" if it is done, None if it isn't yet."""
        if self.present is None:
            return ""
        return self.present.error if self.present.done.is_set() else None

    def wait(self, say: Callable[[str], None], limit: float | None = None) -> None:
        """Until this rank's part is done, or ``limit`` seconds have passed (default: as the end of a run waits)."""
        save = self.present
        until = time.monotonic() + (_longest() if limit is None else limit)
        while save is not None and not save.done.wait(max(0.0, min(EVERY, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            say(f"checkpoints: {save.final.name} is still being written, after {save.seconds:.0f} s: waiting for it")

    def finish_alone(self) -> bool:
        """Let the present save end where the other ranks may be gone: this rank's part is written, theirs are waited
        for a few seconds only. False: it doesn't end."""
        if self.present is None:
            return True
        self._gives_up_at = time.monotonic() + ALONE
        done = self.present.done.wait(_longest())
        self.present = None
        return done

    # -- the thread

    def _run(self, save: Save, number: int) -> None:
        began = time.thread_time()
        try:
            if save.leads:
                _remove_others(save.aside)
            try:
                note: Any = {name: list(_write(source, save.aside / name)) for name, source in save.sources.items()}
            except Exception as error:
                note = _text(error)
            self._leave(f"{number}/written", note)
            if save.leads:
                self._complete(save, number)
            elif isinstance(note, str):
                save.error = note
        except Exception as error:
            save.error = _text(error)
        finally:
            save.ended, save.processor = time.monotonic(), time.thread_time() - began
            save.done.set()

    def _complete(self, save: Save, number: int) -> None:
        try:
            files = self._all_written(save, number)
            folders.commit(save.aside, save.final, files, save.keeps_old)
        except Exception as error:
            self._leave(f"{number}/committed", _text(error))
            shutil.rmtree(save.aside, ignore_errors=True)
            raise
        self._leave(f"{number}/committed", "")
        for leader in save.leaders:
            if failure := self._read(f"{number}/committed", leader):
                raise PartFailed(failure if leader == rank() else f"rank {leader}: {failure}")
        save.afterwards()

    def _all_written(self, save: Save, number: int) -> dict[str, Entry]:
        """The files of this folder; waits for all ranks, as a checkpoint counts only if each has written its part."""
        notes = [self._read(f"{number}/written", other) for other in range(world_size())]
        for other, note in enumerate(notes):
            if isinstance(note, str):
                raise PartFailed(note if world_size() == 1 else f"rank {other}: {note}")
        files = {name: Entry(*entry) for other in save.members for name, entry in notes[other].items()}
        manifest.check(save.aside, files, to_read=())  # another node's files may not have come here
        return files

    def _leave(self, subject: str, note: Any) -> None:
        self._left.append(subject)
        self._board.leave(subject, note)

    def _read(self, subject: str, of: int) -> Any:
        began, limit = time.monotonic(), time_limit().total_seconds() if world_size() > 1 else 0.0

        def stop() -> str:
            if time.monotonic() > self._gives_up_at:
                return "this one ends by an error"
            return "ddp_timeout has passed" if time.monotonic() - began > limit else ""

        return self._board.read(subject, of, stop)


def _longest() -> float:
    """Less than other ranks wait in the exchange that follows."""
    return min(LONGEST, time_limit().total_seconds() / 2) if world_size() > 1 else LONGEST


def _write(source: Source, path: Path) -> Entry:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Image):
        return write_image(source, path)
    if isinstance(source, bytes):
        return write_bytes(source, path)
    folders.flush(source)
    entry = manifest.entry_of(source)
    os.rename(source, path)
    return entry


def _remove_others(aside: Path) -> None:
    """What a save that failed may have left: its ranks may have written on when it was given up."""
    for folder in aside.parent.glob("checkpoint-*"):
        if folder != aside:
            shutil.rmtree(folder, ignore_errors=True)


def _text(error: BaseException) -> str:
    text = str(error) if isinstance(error, PartFailed) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]


def files_in(folder: Path) -> dict[str, Source]:
    """The files below a folder, where they lie."""
    return {name: folder / name for name in manifest.files_of(folder)}


def contents_of(folder: Path) -> dict[str, Source]:
    """The same, read into memory."""
    return {name: (folder / name).read_bytes() for name in manifest.files_of(folder)}
