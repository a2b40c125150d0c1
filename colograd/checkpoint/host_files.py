"""Images of files in host memory. A thread writes a checkpoint from them while training continues.

The image of a safetensors file is its header, followed by its tensors. Training only waits for the copies of tensors
into the image. A thread then writes the bytes, around the system's page cache if the file system allows that
(`O_DIRECT`), which takes little processor time. Buffers are kept from save to save, because fresh pages cost more than
the copy. For a GPU they are page-locked: all its copies are queued, with one wait at the end.
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

BLOCK = PAGE  # alignment in bytes of addresses, offsets and lengths that O_DIRECT requires on today's disks
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Image:
    """The bytes of one safetensors file.

    Args:
        layout: the header without offsets. Tensors with the same layout fit into the image.
        tensors: the tensors by name.
        device: the device of later values; for a GPU the memory is page-locked.
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
        """Copy the present values of tensors. Copies from a GPU are complete after `HostFiles.take`.

        A tensor that is a view of this image needs no copy.
        """
        for name, place in self.tensors.items():
            if place.numel() and tensors[name].data_ptr() != place.data_ptr():
                place.copy_(tensors[name], non_blocking=tensors[name].is_cuda)

    @property
    def bytes(self) -> memoryview:
        """The file's bytes, padded with zeros to whole blocks."""
        return self._buffer


class HostFiles:
    """The images of one rank's files, by name.

    Args:
        device: the device of the tensors, see `Image`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.kept: dict[str, Image] = {}
        self._device = device
        self._present: dict[Path, Image] = {}  # images since the last `take`
        self._queued = False  # whether copies from a GPU may still be queued

    def put(self, tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: Any = None) -> None:
        """Save tensors as `safetensors.torch.save_file` does, but in memory. `take` waits for copies from a GPU."""
        path = Path(path)
        layout = _layout(tensors, metadata)
        image = self.kept.get(path.name)
        if image is None or image.layout != layout:
            image = self.kept[path.name] = Image(layout, tensors, self._device)
        self._queued |= any(tensor.is_cuda for tensor in tensors.values())
        image.fill(tensors)
        self._present[path] = image

    def take(self) -> dict[Path, Image]:
        """Wait for copies from a GPU, and return the images since the last call."""
        if self._queued:
            torch.cuda.synchronize()
            self._queued = False
        images, self._present = self._present, {}
        return images

    def places(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors in a file's image, from its last `put`. Values written there need no copy in `put`."""
        return self.kept[name].tensors if name in self.kept else {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(image.size for image in self.kept.values())


@contextlib.contextmanager
def saving_model(model: Any, write: Callable[..., Any] | None = None) -> Iterator[None]:
    """Change ``model.save_pretrained`` in two ways that it has no arguments for.

    Each rank that calls it writes, because nodes may have separate folders; transformers lets only rank 0 write.

    Args:
        model: the model.
        write: writes a file of tensors instead of `safetensors.torch.save_file`.
    """
    original = getattr(modeling_utils, "safe_save_file", None)  # None in some versions, which then write files
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    if write is not None and original is not None:
        modeling_utils.safe_save_file = write
    try:
        yield
    finally:
        del model.should_save_on_this_rank
        if original is not None:
            modeling_utils.safe_save_file = original


def _layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    layout: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        layout[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}
    return layout


def _header(layout: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the bytes before the first tensor, each tensor's offset in the file, and the file's size."""
    offsets, end = {}, 0
    entries: dict[str, Any] = {}
    for name, entry in layout.items():
        entries[name] = entry
        if name in tensors:
            offsets[name], end = end, end + tensors[name].numel() * tensors[name].element_size()
            entries[name] = {**entry, "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    first = -(-(8 + len(text)) // BLOCK) * BLOCK  # the format allows blanks after the header
    header = (first - 8).to_bytes(8, "little") + text.ljust(first - 8)
    return header, {name: first + offset for name, offset in offsets.items()}, first + end


def _view(buffer: memoryview, start: int, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


# -- onto the disk


def write_image(image: Image, path: Path) -> Entry:
    """Write an image to the disk and flush it. Return the file's entry for the manifest."""
    return _write(path, image.bytes, image.size)


def write_bytes(content: bytes, path: Path) -> Entry:
    """Write a few bytes as `write_image` does."""
    return _write(path, memoryview(content), len(content))


def _write(path: Path, content: memoryview, size: int) -> Entry:
    """Write ``size`` bytes of ``content``, which may be longer, up to the end of a block."""
    digest = xxhash.xxh3_128()
    direct = getattr(os, "O_DIRECT", 0) if len(content) % BLOCK == 0 else 0
    descriptor = _open(path, direct)
    try:
        done = 0
        while done < size:
            chunk = content[done : done + CHUNK]
            digest.update(chunk[: size - done])
            _write_all(descriptor, chunk)
            done += len(chunk)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Entry(size, digest.hexdigest())


def _open(path: Path, direct: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if direct:
        with contextlib.suppress(OSError):  # the file system may not support it; any other error recurs below
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
        if written % BLOCK:  # the rest isn't aligned
            _stop_direct(descriptor)
        chunk = chunk[written:]


def _stop_direct(descriptor: int) -> bool:
    """Continue through the page cache. Return False if the file is already written in that way."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)
