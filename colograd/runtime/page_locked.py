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


def new_pages(nbytes: int) -> mmap.mmap:
    """Host memory for ``nbytes``, rounded up to whole pages; in large pages where the kernel has them."""
    pages = mmap.mmap(-1, max(-(-nbytes // PAGE), 1) * PAGE)
    if len(pages) >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def lock_pages(owner: Any, address: int, nbytes: int, device: torch.device) -> None:
    """Lock a stretch of host memory until ``owner`` is freed.

    No error if that can't be: the memory stays as it is, and copies into it are slower.

    Args:
        owner: keeps the memory mapped.
        address: of its first byte, where a page begins.
        device: the GPU that is asked; the lock holds for all of them.
    """
    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if failed:
        _forget_error(device)
    else:
        # Not at exit, when CUDA may be gone: the locks end with the process anyway.
        weakref.finalize(owner, _unlock_pages, address, device).atexit = False


def _unlock_pages(address: int, device: torch.device) -> None:
    # The thread that writes may be the last to have the memory: without a device of its own it would wake up GPU 0.
    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostUnregister(address))
    if failed:
        _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """CUDA reports a call's error once more at the next kernel's launch, which is to be none of the training's."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
