"""Page-locked host memory, which a GPU copies directly, asynchronously and at the bus's full speed.

Buffers are allocated, then registered with CUDA. Torch's `pin_memory` would round sizes up to powers of two.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future

import torch

PAGE = 4096
HUGE = 2**21  # Bytes of a large page.
_reserved: dict[tuple[torch.device, int], collections.deque[Future[memoryview]]] = {}  # Buffers by (device, bytes).


def host_pages(nbytes: int, device: torch.device | None) -> memoryview:
    """Return a view of at least ``nbytes`` of new host memory. If ``device`` is a GPU, the memory is page-locked,
    if possible, until the view and all storages that use the memory are freed."""
    # Private memory, because few machines allow large pages for shared memory.
    pages = mmap.mmap(-1, max(-(-nbytes // PAGE), 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(pages) >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Some kernels have no large pages.
            pages.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(pages)
    if device is not None and device.type == "cuda":
        pages.madvise(mmap.MADV_DONTFORK)  # A write after a fork would take the page from the GPU.
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        # If registering fails, the memory stays pageable, and copies are slower.
        if _call(device, pages, "cudaHostRegister", address, len(pages), 0):
            # Don't unregister at interpreter exit, because CUDA may be gone.
            weakref.finalize(view, _call, device, pages, "cudaHostUnregister", address).atexit = False
    return view


def reserve(sizes: Iterable[int], device: torch.device) -> None:
    """Start a thread that page-locks one buffer for each size in ``sizes`` (bytes), for later calls of `host_empty`.
    For a large model this takes minutes. The first generation runs meanwhile."""
    if device.type != "cuda":
        return
    buffers: list[tuple[int, Future[memoryview]]] = [(size, Future()) for size in sizes]
    for size, buffer in buffers:
        _reserved.setdefault((device, size), collections.deque()).append(buffer)

    def lock() -> None:
        for size, buffer in buffers:
            try:
                buffer.set_result(host_pages(size, device))
            except BaseException as error:  # `host_empty` raises the error.
                buffer.set_exception(error)

    threading.Thread(target=lock, name="page-locking", daemon=True).start()


def host_empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    nbytes = shape.numel() * dtype.itemsize
    buffers = _reserved.get((device, nbytes))
    pages = buffers.popleft().result() if buffers else host_pages(nbytes, device)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes].view(dtype).view(shape)


def _call(device: torch.device, pages: mmap.mmap, function: str, *arguments: int) -> bool:
    """Call a function of CUDA's runtime, and return whether it succeeded. ``pages`` only keeps the memory alive."""
    # A thread that frees memory, such as the checkpoint writer's, would initialise GPU 0 without `torch.cuda.device`.
    with torch.cuda.device(device):
        failed = int(getattr(torch.cuda.cudart(), function)(*arguments))
    if failed:  # Clear CUDA's last error, which the next kernel launch would report.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    return not failed
