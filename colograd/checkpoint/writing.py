"""Write checkpoints, if possible in a thread while training continues.

Each rank's thread writes the rank's files, from copies in memory (`Image`) or from temporary files. A leading rank
(rank 0, or one rank per node if nodes share no file system) waits for the reports of all ranks, writes the manifest,
and renames the folder. Reports go through the process group's store."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from transformers import TrainerCallback, modeling_utils
from transformers.trainer_utils import HubStrategy

from ..config import GRPOConfig
from ..parallel.ranks import rank, time_limit, world_size
from ..runtime import process
from ..runtime.page_locked import host_pages
from . import folders, manifest
from .manifest import CHUNK, Entry

ALONE = 5.0  # Seconds that a rank still waits for other ranks' reports when an error ends this rank.
LONGEST = 900.0  # Maximum seconds to wait for the end of a save, e.g. at the end of a run.
EVERY = 30.0  # Seconds between two messages that a checkpoint is still being written.
POLL = 0.05  # Seconds between two checks whether another rank's report is in the store.
SPARE = 0.8  # Maximum fraction of the free host memory that new copies of tensors may take.

ALIGNED = 64  # the first tensor in a file begins at a multiple of this number of bytes
NAMES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}

_numbers = itertools.count(1)  # equal on all ranks, which create `Writer` objects in the same order


class Image:
    """The bytes of one safetensors file in host memory. ``layout`` is the file's header without the tensors' offsets.

    `HostFiles` reuses an image for a file with equal name and layout: allocating memory takes longer than copying."""

    def __init__(
        self, layout: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
    ) -> None:
        self.layout = layout
        entries, offsets, end = dict(layout), dict[str, int](), 0
        for name in layout:
            if name in tensors:
                offsets[name], end = end, end + tensors[name].nbytes
                entries[name] = {**layout[name], "data_offsets": [offsets[name], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        first = -(-(8 + len(text)) // ALIGNED) * ALIGNED  # safetensors allows blanks behind the header
        self.size = first + end
        self._buffer = host_pages(self.size, device)
        self._buffer[:first] = (first - 8).to_bytes(8, "little") + text.ljust(first - 8)
        self.tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if count := tensor.numel():
                flat = torch.frombuffer(self._buffer, dtype=tensor.dtype, count=count, offset=first + offsets[name])
                self.tensors[name] = flat.view(tensor.shape)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into the image. Copies from a GPU are only queued: `HostFiles.take` waits for their end."""
        for name, place in self.tensors.items():
            if place.numel() and tensors[name].data_ptr() != place.data_ptr():
                place.copy_(tensors[name], non_blocking=tensors[name].is_cuda)

    @property
    def bytes(self) -> memoryview:
        return self._buffer[: self.size]


class HostFiles:
    def __init__(self, device: torch.device | None = None) -> None:
        self.kept: dict[str, Image] = {}
        self._device = device
        self._present: dict[Path, Image] = {}
        self._queued = False

    def put(self, tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: Any = None) -> None:
        """Copy tensors into an image of the safetensors file ``path``, in host memory. `take` returns the image."""
        path = Path(path)
        layout: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        # Tensors with the largest elements first, so that each offset is a multiple of the tensor's element size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            layout[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        if (image := self.kept.get(path.name)) is None or image.layout != layout:
            image = self.kept[path.name] = Image(layout, tensors, self._device)
        self._queued |= any(tensor.is_cuda for tensor in tensors.values())
        image.fill(tensors)
        self._present[path] = image

    def take(self) -> dict[Path, Image]:
        if self._queued:
            torch.cuda.synchronize()
            self._queued = False
        images, self._present = self._present, {}
        return images

    def places(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return views of the tensors in the image of file ``name``, by tensor name. {} if there is no image yet.

        `put` skips the copy of a tensor that is one of these views."""
        return self.kept[name].tensors if name in self.kept else {}

    @property
    def nbytes(self) -> int:
        return sum(image.size for image in self.kept.values())


@contextlib.contextmanager
def saving_model(model: Any, write: Callable[..., Any] | None = None) -> Iterator[None]:
    """Make `save_pretrained` write files on each rank that calls it with `is_main_process`, e.g. one rank per node.

    ``write`` replaces transformers' function that writes a safetensors file."""
    original = getattr(modeling_utils, "safe_save_file", None)  # some versions of transformers lack this function
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    if write is not None and original is not None:
        modeling_utils.safe_save_file = write
    try:
        yield
    finally:
        del model.should_save_on_this_rank
        if original is not None:
            modeling_utils.safe_save_file = original


def write_bytes(content: bytes | memoryview, path: Path) -> Entry:
    digest = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        done = 0
        while done < len(content):
            chunk = content[done : done + CHUNK]
            written = file.write(chunk)
            digest.update(chunk[:written])
            done += written
        os.fsync(file.fileno())
    return Entry(len(content), digest.hexdigest())


Source = Image | bytes | Path  # content of a file, or the path of a file to move


class PartFailed(RuntimeError):
    """A rank couldn't write its files or commit a folder. The text is that rank's error message."""


@dataclass
class Save:
    step: int
    final: Path
    aside: Path
    sources: Mapping[str, Source]  # Content of this rank's files, by path in the checkpoint.
    leads: bool  # Whether this rank writes the manifest and renames the folder ``aside`` to ``final``.
    leaders: Sequence[int]
    members: Sequence[int]
    afterwards: Callable[[], None]  # Called when the folders of all nodes are complete.
    keeps_old: bool = False  # Whether an existing, damaged folder ``final`` is renamed, not deleted.
    started: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    ended: float = 0.0
    error: str = ""

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started


class Writer:
    def __init__(self) -> None:
        self.present: Save | None = None
        self._name = f"colograd/notes/{next(_numbers)}"
        self._store: dist.Store = dist.HashStore()
        self.number = 1
        self._keys: list[str] = []
        self._deadline = float("inf")  # time after which this rank no longer waits for other ranks' reports

    def begin(self, save: Save, in_background: bool) -> None:
        number, self.number = self.number, self.number + 1
        self.present, self._deadline = save, float("inf")
        for key in self._keys:  # no rank reads the last save's reports any more
            self._store.delete_key(key)
        self._keys = []
        if world_size() > 1:
            self._store = dist.distributed_c10d._get_default_store()
        if in_background:
            threading.Thread(target=self._run, args=(save, number), name="colograd-save", daemon=True).start()
        else:
            self._run(save, number)

    def state(self) -> str | None:
        """Return the save's error message, "" after success or without a save, or None while the save runs."""
        if self.present is None:
            return ""
        return self.present.error if self.present.done.is_set() else None

    def wait(self, say: Callable[[str], None], limit: float | None = None) -> None:
        save = self.present
        until = time.monotonic() + (_longest() if limit is None else limit)
        while save is not None and not save.done.wait(max(0.0, min(EVERY, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            say(f"checkpoints: {save.final.name} is still being written, after {save.seconds:.0f} s: waiting for it")

    def finish_alone(self) -> bool:
        """Wait until this rank's save ends, even if other ranks have died. Return False if the save takes too long."""
        if self.present is None:
            return True
        self._deadline = time.monotonic() + ALONE
        done = self.present.done.wait(_longest())
        self.present = None
        return done

    def _run(self, save: Save, number: int) -> None:
        try:
            if save.leads:
                for folder in set(save.aside.parent.glob("checkpoint-*")) - {save.aside}:
                    shutil.rmtree(folder, ignore_errors=True)
            try:
                note: Any = {name: _write(source, save.aside / name) for name, source in save.sources.items()}
            except Exception as error:
                note = save.error = _text(error)
            self._leave(f"{number}/written", note)
            if save.leads:
                self._complete(save, number)
        except Exception as error:
            save.error = _text(error)
        finally:
            save.ended = time.monotonic()
            save.done.set()

    def _complete(self, save: Save, number: int) -> None:
        try:
            notes = [self._read(f"{number}/written", other) for other in range(world_size())]
            for other, note in enumerate(notes):
                if isinstance(note, str):
                    raise PartFailed(note if world_size() == 1 else f"rank {other}: {note}")
            files = {name: Entry(*entry) for other in save.members for name, entry in notes[other].items()}
            manifest.check(save.aside, files, to_read=())  # fails if this rank can't see the files of other nodes
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
        """Report to other ranks through the store. A collective would mix with the training thread's collectives."""
        self._keys.append(f"{self._name}/{subject}/{rank()}")
        self._store.set(self._keys[-1], json.dumps(note))

    def _read(self, subject: str, of: int) -> Any:
        key, started = f"{self._name}/{subject}/{of}", time.monotonic()
        while not self._store.check([key]):  # `get` would lock the store, which the training thread also uses
            until = started + time_limit().total_seconds()
            if time.monotonic() > min(until, self._deadline):
                reason = "this rank ends by an error" if self._deadline < until else "`ddp_timeout` has passed"
                raise RuntimeError(f"rank {of} hasn't reported the end of its part of the save: {reason}")
            time.sleep(POLL)
        return json.loads(self._store.get(key))


def _longest() -> float:
    """Return the longest wait for a save, in seconds.

    With several ranks, it is at most half of a collective's time limit: other ranks may wait in a collective."""
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
    """Return why training must wait for the end of a save, or "" if the save can run in the background.

    ``copies``: bytes of this rank's tensors to copy. ``held``: bytes of images that exist already."""
    if not config.save_in_background:
        return "save_in_background is false"
    if config.push_to_hub and config.hub_strategy != HubStrategy.END:
        return f"each is pushed to the Hub (hub_strategy: {HubStrategy(config.hub_strategy).value})"
    if readers := [type(callback).__name__ for callback in callbacks if _reads_files(callback)]:
        return f"{readers[0]}.on_save may read it"
    if not config.save_only_model and not optimizer_is_cut:
        return f"the state of optim: {config.optim} isn't made of tensors alone"
    free, missing = psutil.virtual_memory().available, max(copies - held, 0) * process.local_world_size()
    need = f"its copy would take {missing / 2**30:,.1f} GiB of host memory, of which {free / 2**30:,.1f} GiB are free"
    return need if missing > SPARE * free else ""


def _reads_files(callback: TrainerCallback) -> bool:
    name = type(callback).__name__
    if getattr(type(callback), "on_save", None) is TrainerCallback.on_save or name == "TrackioCallback":
        return False  # `TrackioCallback.on_save` does nothing
    switches = {"WandbCallback": "_log_model", "MLflowCallback": "_log_artifacts", "CometCallback": "_log_checkpoints"}
    switch = getattr(callback, switches.get(name, ""), True)
    return getattr(switch, "value", switch) == "checkpoint" if name == "WandbCallback" else bool(switch)
