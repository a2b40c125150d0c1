"""Host memory that a GPU reads and writes by itself: its pages are locked, so that copies are queued, and go at the
bus's speed.

Buffers that are there already are registered. `pin_memory` would allocate others, of sizes rounded up to powers of two.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import torch

PAGE = 4096
HUGE = 2**21  # from here on larger pages are asked for


def host_pages(nbytes: int, device: torch.device | None) -> memoryview:
    """Host memory for ``nbytes``, rounded up to whole pages; in large pages where the kernel has them. For a GPU
    ``device`` it is page-locked until nobody has this view, nor a storage made of it."""
    # Private: the kernel has large pages for shared memory on few machines. No other process reads these.
    pages = mmap.mmap(-1, max(-(-nbytes // PAGE), 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(pages) >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(pages)
    if device is not None and device.type == "cuda":
        _lock_pages(view, pages, device)
    return view


def host_empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor in host memory of its own, page-locked for a GPU ``device`` as long as its storage is."""
    nbytes = shape.numel() * dtype.itemsize
    return torch.frombuffer(host_pages(nbytes, device), dtype=torch.uint8)[:nbytes].view(dtype).view(shape)


def _lock_pages(owner: Any, pages: mmap.mmap, device: torch.device) -> None:
    """Lock ``pages`` until ``owner`` is freed.

    No error if that can't be: the memory stays as it is, and copies into it are slower.

    Args:
        device: the GPU that is asked; the lock holds for all of them.
    """
    if hasattr(mmap, "MADV_DONTFORK"):  # after a fork, a write could move a page away from the one that the GPU reads
        pages.madvise(mmap.MADV_DONTFORK)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostRegister(address, len(pages), 0))
    if failed:
        _forget_error(device)
    else:
        # Not at exit, when CUDA may be gone: the locks end with the process anyway.
        weakref.finalize(owner, _unlock_pages, address, device, pages).atexit = False


def _unlock_pages(address: int, device: torch.device, mapped: mmap.mmap) -> None:
    """``mapped``: the pages, which are there as long as this call isn't done."""
    # The thread that writes may be the last to have the memory: without a device of its own it would wake up GPU 0.
    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostUnregister(address))
    if failed:
        _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """CUDA reports a call's error once more at the next kernel's launch, which is to be none of the training's."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
