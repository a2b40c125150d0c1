"""Metrics of an optimizer step, reduced over all ranks once per step, and the seconds of the step's phases."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..parallel import watchdog
from ..parallel.ranks import gather


class Metrics:
    """One rank's means, totals, minima and maxima. Values may be GPU tensors; only `reduce` copies them to the host."""

    def __init__(self) -> None:
        self._means: dict[str, list[Any]] = {}  # Means by name, each as [sum, count].
        self._totals: dict[str, Any] = {}
        self._minima: dict[str, list[Any]] = defaultdict(list)
        self._maxima: dict[str, list[Any]] = defaultdict(list)

    def total(self, name: str, value: float | torch.Tensor) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + value

    def update(self, sums: Mapping[str, tuple[Any, Any]], minima: Mapping[str, Any], maxima: Mapping[str, Any]) -> None:
        """Add the metrics of a loss: ``sums`` maps names to (sum, count)."""
        for name, (total, count) in sums.items():
            entry = self._means.setdefault(name, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + total, entry[1] + count
        for extremes, values in ((self._minima, minima), (self._maxima, maxima)):
            for name, value in values.items():
                extremes[name].append(value)

    def reduce(self, counted: bool = True) -> dict[str, float]:
        """Return all metrics by name, reduced over the ranks with ``counted`` true. All ranks must call this."""
        extremes = (*self._minima.values(), *self._maxima.values())
        known = iter(numbers(itertools.chain(itertools.chain(*self._means.values()), self._totals.values(), *extremes)))
        own: tuple[dict[str, Any], ...] = (
            {name: (next(known), next(known)) for name in self._means},
            {name: next(known) for name in self._totals},
            {name: min(next(known) for _ in values) for name, values in self._minima.items()},
            {name: max(next(known) for _ in values) for name, values in self._maxima.items()},
        )
        result: dict[str, float] = {}
        joins: tuple[Any, ...] = (_mean, sum, min, max)
        for join, ranks in zip(joins, zip(*gather(own if counted else ({}, {}, {}, {})), strict=True), strict=True):
            for name in dict.fromkeys(name for rank in ranks for name in rank):
                result[name] = join([rank[name] for rank in ranks if name in rank])
        return {name: value for name, value in result.items() if value is not None}


def _mean(parts: Iterable[tuple[float, float]]) -> float | None:
    total, count = (sum(column) for column in zip(*parts, strict=True))
    return total / count if count else None


def numbers(values: Iterable[float | torch.Tensor]) -> list[float]:
    """Convert numbers and () tensors to floats, with one copy to the host per device."""
    given = list(values)
    found = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in given]
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, value in enumerate(given):
        if isinstance(value, torch.Tensor):
            places[value.device].append(place)
    for of_device in places.values():
        read = torch.stack([given[place].detach().double().reshape(()) for place in of_device]).tolist()  # type: ignore[union-attr]
        for place, value in zip(of_device, read, strict=True):
            found[place] = value
    return found


class PhaseTimes:
    """Wall-clock seconds of each phase of an optimizer step."""

    def __init__(self, synchronize: bool = False) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._step_began = time.perf_counter()
        self._synchronize = synchronize  # If true, wait for CUDA, so that a phase is charged with its kernels.
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
        """Count ``seconds`` of phase ``source`` as phase ``target``, such as a reward call between steps of vLLM."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def begin_step(self) -> None:
        """Start a new step. Drop the seconds since the last one, which starting, logging, evaluating or saving took."""
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
        """Return the seconds of each phase as ``time/<phase>``, and reset them to 0."""
        taken = {f"time/{name}": value for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
