"""A profile of some steps by torch.profiler: a trace for chrome://tracing or Perfetto, and a table of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ROWS = 30  # of the table


class StepProfile:
    """Of one rank, from `start` to `stop`, into files of ``folder``, with the phases of a step by name."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.suffix = folder, f"-rank{rank}" if ranks > 1 else ""
        self._profiler: Any = None

    def start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.__enter__()

    def stop(self) -> str:
        """End it and write the files; returns a line that names them.

        Raises:
            OSError: they can't be written.
        """
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        trace, table = self.folder / f"trace{self.suffix}.json", self.folder / f"operators{self.suffix}.txt"
        profiler.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table.write_text(profiler.key_averages().table(sort_by=by, row_limit=ROWS), encoding="utf-8")
        return f"profile: {trace} (for chrome://tracing or Perfetto) and {table}"
