"""Host memory that a GPU reads and writes by itself. Its pages are locked, so copies are queued, and go at the bus's
speed.

Existing buffers are registered. `pin_memory` would allocate others, of sizes rounded up to powers of two.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch

PAGE = 4096
HUGE = 2**21  # bytes; buffers of at least this size request larger pages


def host_pages(nbytes: int, device: torch.device | None) -> memoryview:
    """Allocate host memory for ``nbytes``, rounded up to whole pages; large pages if the kernel has them. For a GPU
    ``device`` it is page-locked until the view and all storages made from it are freed."""
    # Private, because few machines have large pages for shared memory. No other process reads these pages.
    pages = mmap.mmap(-1, max(-(-nbytes // PAGE), 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(pages) >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(pages)
    if device is not None and device.type == "cuda":
        if hasattr(mmap, "MADV_DONTFORK"):  # after a fork, a write could replace a page that the GPU reads
            pages.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        # If it fails, the memory stays pageable, and copies into it are slower. The lock holds for all GPUs.
        if _call(device, pages, "cudaHostRegister", address, len(pages), 0):
            # Not at exit, when CUDA may be gone: the locks end with the process anyway.
            weakref.finalize(view, _call, device, pages, "cudaHostUnregister", address).atexit = False
    return view


def host_empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised tensor in its own host memory, page-locked for a GPU while its storage lives."""
    nbytes = shape.numel() * dtype.itemsize
    return torch.frombuffer(host_pages(nbytes, device), dtype=torch.uint8)[:nbytes].view(dtype).view(shape)


def _call(device: torch.device, pages: mmap.mmap, function: str, *arguments: int) -> bool:
    """Call a function of CUDA's runtime, and return whether it succeeded. ``pages`` live at least until it returns."""
    # The writer thread may free the memory last. Without a device of its own it would initialise GPU 0.
    with torch.cuda.device(device):
        failed = int(getattr(torch.cuda.cudart(), function)(*arguments))
    if failed:  # clear CUDA's last error, which it would report again at the next kernel's launch
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    return not failed
