"""Files as they will lie on the disk, kept in host memory: what a checkpoint is written from while training goes on.

The image of a safetensors file is its header and then its tensors, one after the other. Copying tensors into their
places is all that a save costs the training; a thread then writes the bytes as they are, past the system's page cache
where the file system can (`O_DIRECT`), which takes hardly any time of a processor. Buffers are kept from save to save:
fresh pages cost more than the copy. For a GPU they are page-locked: its copies are queued, and waited for once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import modeling_utils

from ..runtime.page_locked import PAGE, host_pages
from .manifest import CHUNK, Entry

BLOCK = PAGE  # which O_DIRECT asks of addresses, offsets and lengths, on any disk of today
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Image:
    """One file's bytes. ``layout`` is the safetensors header without offsets: tensors of the same one fit again.

    Args:
        device: from where values will come; a GPU has the memory page-locked.
    """

    def __init__(
        self, layout: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
    ) -> None:
        self.layout = layout
        header, places, self.size = _header(layout, tensors)
        self._buffer = host_pages(self.size, device)
        self._buffer[: len(header)] = header
        self.tensors = {name: _view(self._buffer, places[name], tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the present values; those of a GPU are there when it was waited for (`HostFiles.take`). A tensor that is
        a place of this image has them already."""
        for name, place in self.tensors.items():
            if place.numel() and tensors[name].data_ptr() != place.data_ptr():
                place.copy_(tensors[name], non_blocking=tensors[name].is_cuda)

    @property
    def bytes(self) -> memoryview:
        """Whole blocks: the last one ends with zeros that are no part of the file."""
        return self._buffer


class HostFiles:
    """The images of one rank's files, by name.

    Args:
        device: as of `Image`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.kept: dict[str, Image] = {}
        self._device = device
        self._present: dict[Path, Image] = {}
        self._queued = False  # copies that nobody has waited for

    def put(self, tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: Any = None) -> None:
        """As `safetensors.torch.save_file`, but into memory. Values of a GPU are on their way until `take`."""
        path = Path(path)
        layout = _layout(tensors, metadata)
        image = self.kept.get(path.name)
        if image is None or image.layout != layout:
            image = self.kept[path.name] = Image(layout, tensors, self._device)
        self._queued |= any(tensor.is_cuda for tensor in tensors.values())
        image.fill(tensors)
        self._present[path] = image

    def take(self) -> dict[Path, Image]:
        """What was put since the last call, with all its values: waits for a GPU's copies."""
        if self._queued:
            torch.cuda.synchronize()
            self._queued = False
        taken, self._present = self._present, {}
        return taken

    def places(self, name: str) -> Mapping[str, torch.Tensor]:
        """Where a file's tensors lie since it was put last: who writes there spares `put` the copy."""
        return self.kept[name].tensors if name in self.kept else {}

    @property
    def nbytes(self) -> int:
        """In host memory."""
        return sum(image.size for image in self.kept.values())


@contextlib.contextmanager
def saving_model(model: Any, write: Callable[..., Any] | None = None) -> Iterator[None]:
    """Within it ``model.save_pretrained`` does two things for which it takes no arguments.

    Each rank that calls it writes, where transformers lets rank 0 alone write: nodes may have folders of their own.

    Args:
        write: writes a file of tensors in the place of `safetensors.torch.save_file`.
    """
    usual = getattr(modeling_utils, "safe_save_file", None)  # another transformers may have none: files are written
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    if write is not None and usual is not None:
        modeling_utils.safe_save_file = write
    try:
        yield
    finally:
        del model.should_save_on_this_rank
        if usual is not None:
            modeling_utils.safe_save_file = usual


def _layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    layout: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        layout[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}
    return layout


def _header(layout: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The bytes before the first tensor, each tensor's place in the file, and the file's size."""
    offsets, end = {}, 0
    entries: dict[str, Any] = {}
    for name, said in layout.items():
        entries[name] = said
        if name in tensors:
            offsets[name], end = end, end + tensors[name].numel() * tensors[name].element_size()
            entries[name] = {**said, "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    first = -(-(8 + len(text)) // BLOCK) * BLOCK  # blanks after the header are allowed
    header = (first - 8).to_bytes(8, "little") + text.ljust(first - 8)
    return header, {name: first + offset for name, offset in offsets.items()}, first + end


def _view(buffer: memoryview, start: int, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


# -- onto the disk


def write_image(image: Image, path: Path) -> Entry:
    """Write a file, down to the disk; what the manifest says of it."""
    return _write(path, image.bytes, image.size)


def write_bytes(content: bytes, path: Path) -> Entry:
    """The same for a few bytes."""
    return _write(path, memoryview(content), len(content))


def _write(path: Path, content: memoryview, size: int) -> Entry:
    """``content`` may go beyond ``size`` to the end of a block."""
    hashed = xxhash.xxh3_128()
    direct = getattr(os, "O_DIRECT", 0) if len(content) % BLOCK == 0 else 0
    descriptor = _open(path, direct)
    try:
        done = 0
        while done < size:
            chunk = content[done : done + CHUNK]
            hashed.update(chunk[: size - done])
            _write_all(descriptor, chunk)
            done += len(chunk)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Entry(size, hashed.hexdigest())


def _open(path: Path, direct: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if direct:
        with contextlib.suppress(OSError):  # a file system that can't; any other reason comes again
            return os.open(path, flags | direct, 0o666)
    return os.open(path, flags, 0o666)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        try:
            written = os.write(descriptor, chunk)
        except OSError as error:
            if error.errno != errno.EINVAL or not _stop_direct(descriptor):
                raise
            continue
        if written % BLOCK:  # what is left isn't aligned
            _stop_direct(descriptor)
        chunk = chunk[written:]


def _stop_direct(descriptor: int) -> bool:
    """Go on through the page cache; False: it was so already."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)
