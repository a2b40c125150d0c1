"""Helpers of the benchmarks: peak memory, the machine's name, Markdown tables and JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

GB = 1e9  # bytes


class PeakMemory:
    """Peak bytes of this process since `reset`: torch's allocated bytes on a GPU, the resident set on a CPU.

    ``exact`` is False if the resident set's peak can't be reset (outside Linux).
    """

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.exact = True

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.exact = False

    def now(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else _status("VmRSS")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else _status("VmHWM")


class OwnMemory(threading.Thread):
    """Largest private memory of this process, sampled fifty times a second: resident, and mapped. Linux only."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.resident, self.mapped = _status("RssAnon"), _status("VmData")

    def run(self) -> None:
        while True:
            self.resident = max(self.resident, _status("RssAnon"))
            self.mapped = max(self.mapped, _status("VmData"))
            time.sleep(0.02)


def _status(name: str) -> int:
    """Return the bytes of an entry of /proc/self/status, or the peak resident set without such a file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {names[0] if names else 'a CPU'}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    rule = [*["---"] * text_columns, *["---:"] * (len(header) - text_columns)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
