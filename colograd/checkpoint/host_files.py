"""Copy tensors into safetensors files in host memory (`Image`). A thread writes these files while training continues.

An image is the header of a safetensors file, followed by the tensors. Training waits only while tensors are copied into
images. Buffers are reused for the next save, because allocating memory takes longer than copying. For a GPU the buffers
are page-locked: all copies are queued, and training waits once at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from transformers import modeling_utils

from ..runtime.page_locked import host_pages
from .manifest import CHUNK, Entry

ALIGNED = 64  # the first tensor in a file begins at a multiple of this number of bytes
NAMES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}


class Image:
    """The bytes of one safetensors file in host memory, page-locked if ``device`` is a GPU. ``layout`` is the file's
    header without offsets. Tensors with an equal layout can be copied into the image."""

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
        """Copy tensors into the image, except tensors that are views of the image. Copies from a GPU are asynchronous:
        `HostFiles.take` waits for them."""
        for name, place in self.tensors.items():
            if place.numel() and tensors[name].data_ptr() != place.data_ptr():
                place.copy_(tensors[name], non_blocking=tensors[name].is_cuda)

    @property
    def bytes(self) -> memoryview:
        return self._buffer[: self.size]


class HostFiles:
    """The safetensors files of one rank in host memory, by file name. The tensors come from ``device``."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.kept: dict[str, Image] = {}
        self._device = device
        self._present: dict[Path, Image] = {}  # Files written since the last `take`, by path.
        self._queued = False  # Whether copies from a GPU may still be queued.

    def put(self, tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: Any = None) -> None:
        """Save tensors as `safetensors.torch.save_file` does, but in host memory. `take` waits for copies from a
        GPU."""
        path = Path(path)
        layout: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        # Order tensors by falling element size, so that every tensor's offset is a multiple of its element size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            layout[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        image = self.kept.get(path.name)
        if image is None or image.layout != layout:
            image = self.kept[path.name] = Image(layout, tensors, self._device)
        self._queued |= any(tensor.is_cuda for tensor in tensors.values())
        image.fill(tensors)
        self._present[path] = image

    def take(self) -> dict[Path, Image]:
        """Wait for copies from a GPU. Return the files that were written since the last call, as path -> `Image`."""
        if self._queued:
            torch.cuda.synchronize()
            self._queued = False
        images, self._present = self._present, {}
        return images

    def places(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a file in host memory, from the last `put` of this name. Tensors that are written into
        these views need no copy in the next `put`."""
        return self.kept[name].tensors if name in self.kept else {}

    @property
    def nbytes(self) -> int:
        return sum(image.size for image in self.kept.values())


@contextlib.contextmanager
def saving_model(model: Any, write: Callable[..., Any] | None = None) -> Iterator[None]:
    """Context manager that changes ``model.save_pretrained`` in two ways. Every rank that calls it writes files,
    because nodes may have separate folders (in transformers only rank 0 writes). ``write`` replaces
    `safetensors.torch.save_file`."""
    original = getattr(modeling_utils, "safe_save_file", None)  # some versions of transformers lack `safe_save_file`
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
    """Write a file and flush it to the disk. Return its size and checksum, for the manifest."""
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
