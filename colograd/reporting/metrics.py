"""Metrics of an optimizer step, reduced over all ranks once per step, and the seconds of the step's phases."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..parallel import watchdog
from ..parallel.ranks import gather

JOINS: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "count": sum, "total": sum, "min": min, "max": max}


class Metrics:
    """One rank's means, totals, minima and maxima. Values may be GPU tensors; only `reduce` copies them to the host."""

    def __init__(self) -> None:
        # (Key of `JOINS`, metric's name) -> value. A mean has a sum and a count.
        self._sums: dict[tuple[str, str], Any] = {}
        self._extremes: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def total(self, name: str, value: float | torch.Tensor, kind: str = "total") -> None:
        self._sums[kind, name] = self._sums.get((kind, name), 0.0) + value

    def update(self, sums: Mapping[str, tuple[Any, Any]], minima: Mapping[str, Any], maxima: Mapping[str, Any]) -> None:
        """Add the metrics of a loss: ``sums`` maps names to (sum, count)."""
        for name, (total, count) in sums.items():
            self.total(name, total, "sum")
            self.total(name, count, "count")
        for kind, values in (("min", minima), ("max", maxima)):
            for name, value in values.items():
                self._extremes[kind, name].append(value)

    def reduce(self, counted: bool = True) -> dict[str, float]:
        """Return all metrics by name, reduced over the ranks that pass ``counted=True``. All ranks must call this."""
        known = iter(numbers(itertools.chain(self._sums.values(), *self._extremes.values())))
        own = {key: next(known) for key in self._sums}
        own |= {key: JOINS[key[0]]([next(known) for _ in values]) for key, values in self._extremes.items()}
        ranks = gather(own if counted else {})
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        joined = {key: JOINS[key[0]]([rank[key] for rank in ranks if key in rank]) for key in keys}
        means = {n: joined["sum", n] / count for (kind, n), count in joined.items() if kind == "count" and count}
        return means | {name: value for (kind, name), value in joined.items() if kind not in ("sum", "count")}


def numbers(values: Iterable[float | torch.Tensor]) -> list[float]:
    """Convert numbers and one-element tensors to floats, with one copy to the host per device."""
    result: list[Any] = list(values)
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, value in enumerate(result):
        if isinstance(value, torch.Tensor):
            places[value.device].append(place)
    for of_device in places.values():
        read = torch.stack([result[place].detach().double().reshape(()) for place in of_device]).tolist()
        for place, value in zip(of_device, read, strict=True):
            result[place] = value
    return [float(value) for value in result]


class PhaseTimes:
    def __init__(self, synchronize: bool = False) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._step_began = time.perf_counter()
        self._synchronize = synchronize  # Wait for the GPU when a phase ends, so that its time includes its kernels.
        self._retries = self._alloc_retries()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        watchdog.progress(name)
        started = self._now()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self.seconds[name] += self._now() - started
            watchdog.progress(f"what follows {name}")

    def move(self, source: str, target: str, seconds: float) -> None:
        """Subtract ``seconds`` from phase ``source``, and add them to phase ``target``."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def begin_step(self) -> None:
        """Start a new step. Drop the seconds that logging, evaluation or saving took since the end of the last step."""
        self.seconds.clear()
        self._step_began = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """Return the seconds of the step's phases, ``step_time``, and ``time/other``: seconds outside all phases. On a
        GPU also ``train/alloc_retries``: how often torch's allocator found no memory, freed its cache and retried."""
        taken, step_time = self.take(), time.perf_counter() - self._step_began
        before, self._retries = self._retries, self._alloc_retries()
        retries = {"train/alloc_retries": float(self._retries - before)} if self._synchronize else {}
        return {**retries, **taken, "step_time": step_time, "time/other": step_time - sum(taken.values())}

    def _alloc_retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if self._synchronize else 0

    def take(self) -> dict[str, float]:
        taken = {f"time/{name}": value for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
