"""Metrics: sums, minima, maxima and phase times, reduced over ranks once per step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..parallel.ranks import gather


class Metrics:
    """What one rank saw. Values may be tensors: they are read once, at `reduce`."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}
        self._minima: dict[str, list[Any]] = defaultdict(list)
        self._maxima: dict[str, list[Any]] = defaultdict(list)

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor = 1.0) -> None:
        """A mean, given as a sum and the number of things it sums."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0], entry[1] = entry[0] + total, entry[1] + count

    def minimum(self, name: str, value: float | torch.Tensor) -> None:
        self._minima[name].append(value)

    def maximum(self, name: str, value: float | torch.Tensor) -> None:
        self._maxima[name].append(value)

    def update(self, sums: Mapping[str, tuple[Any, Any]], minima: Mapping[str, Any], maxima: Mapping[str, Any]) -> None:
        """Several at once, as a loss returns them."""
        for name, (total, count) in sums.items():
            self.add(name, total, count)
        for name, value in minima.items():
            self.minimum(name, value)
        for name, value in maxima.items():
            self.maximum(name, value)

    def reduce(self) -> dict[str, float]:
        """Over all ranks: means, minima, maxima. One exchange. A mean of nothing is left out."""
        local = (
            {name: (float(total), float(count)) for name, (total, count) in self._sums.items()},
            {name: min(float(v) for v in values) for name, values in self._minima.items()},
            {name: max(float(v) for v in values) for name, values in self._maxima.items()},
        )
        ranks = gather(local)
        result: dict[str, float] = {}
        for name in _names(rank[0] for rank in ranks):
            count = sum(rank[0].get(name, (0.0, 0.0))[1] for rank in ranks)
            if count:
                result[name] = sum(rank[0].get(name, (0.0, 0.0))[0] for rank in ranks) / count
        for name in _names(rank[1] for rank in ranks):
            result[name] = min(rank[1][name] for rank in ranks if name in rank[1])
        for name in _names(rank[2] for rank in ranks):
            result[name] = max(rank[2][name] for rank in ranks if name in rank[2])
        return result


def _names(mappings: Iterator[Mapping[str, Any]]) -> list[str]:
    """The keys of all, in order of appearance."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


class PhaseTimes:
    """Wall-clock seconds of each phase of a step. Phases don't nest: a second is counted once."""

    def __init__(self, synchronize: bool = False) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._synchronize = synchronize  # on CUDA, so that a phase is charged with its kernels

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - started

    def move(self, source: str, target: str, seconds: float) -> None:
        """Charge ``seconds`` that passed inside ``source`` to ``target`` (a reward called between engine steps)."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def take(self) -> dict[str, float]:
        """The seconds so far, as ``time/<phase>``; starts anew."""
        taken = {f"time/{name}": value for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()
