"""NVIDIA GPUs that the operating system shows, whether torch can use them or not.

The module imports only the standard library and doesn't open a GPU.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from pathlib import Path

NODES = "/dev/nvidia[0-9]*"
DRIVER = Path("/proc/driver/nvidia/version")


def nodes() -> list[str]:
    """List the device files (`/dev/nvidia0`, ...) of this machine's or container's GPUs."""
    return sorted(glob.glob(NODES))


def why_unused(torch_version: str, cuda_version: str | None) -> str:
    """Explain why torch finds no GPU although the machine has one, and name the remedy. Without a GPU return an empty
    text. ``cuda_version`` is None if torch is built without CUDA."""
    if not (names := nodes()):
        return ""
    driver = None
    with contextlib.suppress(OSError):
        driver = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text(encoding="utf-8"))
    machine = f"{names[0]} is a GPU{f' (driver {driver.group()})' if driver else ''}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cuda_version is None:
        what = f"torch {torch_version} is built without CUDA: install a build with it"
    elif hidden is not None:
        what = f"CUDA_VISIBLE_DEVICES is {hidden!r}, which leaves torch {torch_version} none: unset it"
    else:
        what = (
            f"torch {torch_version}, built with CUDA {cuda_version}, can't use it. Most often the driver is older than "
            "that CUDA needs: update the driver, or install a torch that is built with an older CUDA"
        )
    return f"{machine}, but {what}; or set use_cpu: true (--use_cpu) to train on the CPU."
