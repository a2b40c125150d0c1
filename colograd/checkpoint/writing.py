"""The writer of checkpoints in parallel to training: one at a time, and complete on all ranks or on none.

A thread of each rank writes the rank's files, from images in memory or from temporary files. The leading rank (of the
run, or of each node) waits for the notes of the others, then writes the manifest and renames the folder. Ranks exchange
the result at the end of a step, where they exchange anyway.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from ..config import GRPOConfig
from ..parallel.ranks import rank, time_limit, world_size
from ..runtime import process
from . import folders, manifest
from .host_files import Image, write_bytes
from .manifest import Entry

ALONE = 5.0  # seconds to wait for other ranks' parts when this rank ends by an error
LONGEST = 900.0  # most seconds that the end of a run waits for a save
EVERY = 30.0  # seconds between two lines about waiting for a save
POLL = 0.05  # seconds between two looks for another rank's note
SPARE = 0.8  # largest share of the free host memory for the copies

_numbers = itertools.count(1)  # one per `Writer`; all ranks create them in the same order

Source = Image | bytes | Path  # a file's content, or a file that is moved


class PartFailed(RuntimeError):
    """A rank couldn't write its part. The text is the rank's error."""


@dataclass
class Save:
    step: int
    final: Path  # the checkpoint's folder
    aside: Path  # the folder that files are written into
    sources: Mapping[str, Source]  # this rank's files, by path in the checkpoint
    leads: bool  # whether this rank completes the folder
    leaders: Sequence[int]  # ranks that complete a folder; several if nodes don't share a file system
    members: Sequence[int]  # ranks that write files into this folder
    afterwards: Callable[[], None]  # is called in the thread of a leading rank when every folder is complete
    keeps_old: bool = False  # the present folder ``final`` is damaged, and is kept under another name
    started: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    ended: float = 0.0
    error: str = ""  # empty: no error

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started


class Writer:
    """The writer of a run's checkpoints, with at most one save at a time."""

    def __init__(self) -> None:
        self.present: Save | None = None
        self._name = f"colograd/notes/{next(_numbers)}"
        self._notes: dict[str, Any] = {}  # the notes of a run with one rank
        self.number = 1  # the number of the next save, for names that belong to it
        self._subjects: list[str] = []  # subjects of this rank's notes
        self._deadline = float("inf")  # time at which waiting for other ranks' notes ends

    def begin(self, save: Save, in_background: bool) -> None:
        number, self.number = self.number, self.number + 1
        self.present, self._deadline = save, float("inf")
        if world_size() > 1:
            for subject in self._subjects:  # all ranks have read these notes, or never will
                _store().delete_key(f"{self._name}/{subject}/{rank()}")
        self._subjects = []
        self._notes.clear()
        if in_background:
            threading.Thread(target=self._run, args=(save, number), name="colograd-save", daemon=True).start()
        else:
            self._run(save, number)

    def state(self) -> str | None:
        """Return the result of this rank's part of the present save: an error, "" if it succeeded, None if it runs."""
        if self.present is None:
            return ""
        return self.present.error if self.present.done.is_set() else None

    def wait(self, say: Callable[[str], None], limit: float | None = None) -> None:
        """Wait up to ``limit`` seconds for the end of this rank's part; default: the limit at the end of a run."""
        save = self.present
        until = time.monotonic() + (_longest() if limit is None else limit)
        while save is not None and not save.done.wait(max(0.0, min(EVERY, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            say(f"checkpoints: {save.final.name} is still being written, after {save.seconds:.0f} s: waiting for it")

    def finish_alone(self) -> bool:
        """Finish the present save when other ranks may be gone: write this rank's part, and wait briefly for theirs.
        Return False if the save doesn't end in time."""
        if self.present is None:
            return True
        self._deadline = time.monotonic() + ALONE
        done = self.present.done.wait(_longest())
        self.present = None
        return done

    # Methods that run in the thread that writes the files.

    def _run(self, save: Save, number: int) -> None:
        try:
            if save.leads:  # delete the folders of failed saves: their ranks may have written later
                for folder in save.aside.parent.glob("checkpoint-*"):
                    if folder != save.aside:
                        shutil.rmtree(folder, ignore_errors=True)
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
            save.ended = time.monotonic()
            save.done.set()

    def _complete(self, save: Save, number: int) -> None:
        """Wait for all ranks' parts, commit the folder, and wait for the other folders, on a leading rank."""
        try:
            notes = [self._read(f"{number}/written", other) for other in range(world_size())]
            for other, note in enumerate(notes):
                if isinstance(note, str):
                    raise PartFailed(note if world_size() == 1 else f"rank {other}: {note}")
            files = {name: Entry(*entry) for other in save.members for name, entry in notes[other].items()}
            manifest.check(save.aside, files, to_read=())  # another node's files may not be visible here
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

    def _leave(self, subject: str, note: Any) -> None:
        """Leave a note (a JSON value) in the process group's store: this thread can't take part in collectives of
        training."""
        self._subjects.append(subject)
        if world_size() == 1:
            self._notes[subject] = note
        else:
            _store().set(f"{self._name}/{subject}/{rank()}", json.dumps(note))

    def _read(self, subject: str, of: int) -> Any:
        """Wait for the note of rank ``of``, up to the deadline or `ddp_timeout`."""
        if world_size() == 1:
            return self._notes[subject]
        store, key, until = _store(), f"{self._name}/{subject}/{of}", time.monotonic() + time_limit().total_seconds()
        while not store.check([key]):  # not `get`, which would block the store for the training thread
            if time.monotonic() > min(until, self._deadline):
                reason = "this one ends by an error" if self._deadline < until else "ddp_timeout has passed"
                raise RuntimeError(f"rank {of} hasn't reported that its part is written: {reason}")
            time.sleep(POLL)
        return json.loads(store.get(key))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _longest() -> float:
    """Return how many seconds to wait for a save: less than other ranks wait in the collective that follows."""
    return min(LONGEST, time_limit().total_seconds() / 2) if world_size() > 1 else LONGEST


def _write(source: Source, path: Path) -> Entry:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Image | bytes):
        return write_bytes(source.bytes if isinstance(source, Image) else source, path)
    folders.flush(source)
    entry = manifest.entry_of(source)
    os.rename(source, path)
    return entry


def _text(error: BaseException) -> str:
    text = str(error) if isinstance(error, PartFailed) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]


def why_in_foreground(config: GRPOConfig, callbacks: list[Any], optimizer_is_cut: bool, copies: int, held: int) -> str:
    """Return the reason why training must wait while a checkpoint is written; empty if it needn't wait. ``copies`` are
    the bytes of this rank's part, of which an earlier save has allocated ``held``."""
    if not config.save_in_background:
        return "save_in_background is false"
    if config.push_to_hub and config.hub_strategy != HubStrategy.END:
        return f"each is pushed to the Hub (hub_strategy: {HubStrategy(config.hub_strategy).value})"
    if readers := [type(callback).__name__ for callback in callbacks if _reads_files(callback)]:
        return f"{readers[0]}.on_save may read it"
    if not config.save_only_model and not optimizer_is_cut:
        return f"the state of optim: {config.optim} isn't made of tensors alone"
    free, ranks = psutil.virtual_memory().available, process.local_world_size()
    if (missing := max(copies - held, 0) * ranks) > SPARE * free:
        return (
            f"its copy would take {missing / 2**30:,.1f} GiB of host memory, of which {free / 2**30:,.1f} GiB are free"
        )
    return ""


def _reads_files(callback: TrainerCallback) -> bool:
    name = type(callback).__name__
    if getattr(type(callback), "on_save", None) is TrainerCallback.on_save or name == "TrackioCallback":
        return False  # Trackio's does nothing
    switches = {"WandbCallback": "_log_model", "MLflowCallback": "_log_artifacts", "CometCallback": "_log_checkpoints"}
    switch = getattr(callback, switches[name], True) if name in switches else True
    return getattr(switch, "value", switch) == "checkpoint" if name == "WandbCallback" else bool(switch)
