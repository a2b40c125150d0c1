"""`Timeline`: a record of the sampling on one rank: engine load, calls of rewards and tools, and early training.

`Recorder.watching` lets the engine, the reward functions and the tools call its methods. A call costs microseconds. The
event that `take` returns has a bounded size, however long the sampling took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...engine.protocol import Load

POINTS = 100  # Maximum number of points of a curve.
CALLS = 64  # Maximum number of recorded reward calls, and of tool calls.


class Timeline:
    """A record of one round of sampling on this rank, from `begin` to `end`. Times are seconds since `begin`."""

    def __init__(self) -> None:
        self.begin()
        self._records = False  # Whether this rank samples now.

    def begin(self) -> None:
        self._began, self._records = time.perf_counter(), True
        self._ended: dict[str, Any] | None = None  # Seconds and preemptions of the sampling.
        self._looks: list[tuple[float, Load]] = []
        self._calls: dict[str, list[tuple[str, float, float, int]]] = {"rewards": [], "tools": [], "trained": []}
        self._until: float | None = None

    def look(self, load: Load) -> None:
        """Record the engine's load after an engine step."""
        if self._records:
            self._looks.append((time.perf_counter() - self._began, load))

    def call(self, kind: str, name: str, started: float, ended: float, count: int = 1) -> None:
        """Record a call, with times of `time.perf_counter`. Any thread may call this method.

        Args:
            kind: ``rewards``, ``tools``, or ``trained``: a training of finished groups while other ranks sample.
            count: number of the reward call's completions, or of the trained tokens.
        """
        if self._records or kind == "trained":
            self._calls[kind].append((name, started - self._began, ended - self._began, count))

    def end(self, preemptions: int) -> None:
        """End the record of this rank's sampling."""
        self._records = False
        self._ended = {"seconds": round(time.perf_counter() - self._began, 3), "preemptions": preemptions}

    def all_sampled(self) -> None:
        self._until = round(time.perf_counter() - self._began, 3)

    def take(self) -> dict[str, Any] | None:
        """Return the contents of the round's "rollout" event. None if this rank hasn't sampled since the last call."""
        ended, self._ended = self._ended, None
        if ended is None:
            return None
        running, waiting, kv = ([(at, load[column]) for at, load in self._looks] for column in range(3))
        rewards, tools, trained = (
            [[name, round(max(a, 0.0), 3), round(max(b, a, 0.0), 3), count] for name, a, b, count in merged(calls)]
            for calls in self._calls.values()
        )
        curves = {"running": curve(running), "waiting": curve(waiting), "kv": curve(kv), "tail": tail(running)}
        spans = {"rewards": rewards, "tools": [call[:3] for call in tools], "trained": trained}
        return {**ended, **curves, **spans, "until": self._until}


def curve(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[list[float]]:
    """Return at most ``most`` of the points, evenly chosen, with the first and the last point."""
    if len(points) > most:
        last = len(points) - 1
        points = [points[index * last // (most - 1)] for index in range(most)]
    return [[round(at, 3), round(value, 3)] for at, value in points]


def tail(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the time after which always fewer than half of the largest number of sequences ran. None if none ran."""
    most = max((value for _, value in points), default=0)
    if not most:
        return None
    after = next((index for index in range(len(points), 0, -1) if points[index - 1][1] >= most / 2), 0)
    return round(points[min(after, len(points) - 1)][0], 3)


def merged(calls: Sequence[tuple[str, float, float, int]], most: int = CALLS) -> list[tuple[str, float, float, int]]:
    """Sort calls by start. If there are more than ``most``, merge neighbours of one name and add up completions."""
    of_names: dict[str, list[tuple[str, float, float, int]]] = {}
    for call in sorted(calls, key=lambda call: call[1]):
        of_names.setdefault(call[0], []).append(call)
    result = []
    for name, own in [*of_names.items()][:most]:
        size = 1 if len(calls) <= most else -(-len(own) // max(1, most // len(of_names)))
        for part in (own[start : start + size] for start in range(0, len(own), size)):
            result.append((name, part[0][1], max(call[2] for call in part), sum(call[3] for call in part)))
    return sorted(result, key=lambda call: call[1])
