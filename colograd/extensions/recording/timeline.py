"""Timeline of one rank's sampling, for the report. Long timelines are thinned out to keep the report small."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...engine.protocol import Load

MOST_POINTS = 100
MOST_CALLS = 64


class Timeline:
    """Timeline of one round of sampling. Times are seconds since `begin`."""

    def __init__(self) -> None:
        self.begin()
        self._sampling = False

    def begin(self) -> None:
        self._began, self._sampling = time.perf_counter(), True
        self._ended: dict[str, Any] | None = None
        self._looks: list[tuple[float, Load]] = []
        self._calls: dict[str, list[tuple[str, float, float, int]]] = {"rewards": [], "tools": [], "trained": []}
        self._until: float | None = None

    def look(self, load: Load) -> None:
        if self._sampling:
            self._looks.append((time.perf_counter() - self._began, load))

    def call(self, kind: str, name: str, started: float, ended: float, count: int = 1) -> None:
        """Record a time span: a reward's call, a tool's call, or training during sampling. Any thread may call this.

        ``count``: completions that the reward judged, or tokens trained. Unused for tools.
        """
        if self._sampling or kind == "trained":
            self._calls[kind].append((name, started - self._began, ended - self._began, count))

    def end(self, preemptions: int) -> None:
        self._sampling = False
        self._ended = {"seconds": round(time.perf_counter() - self._began, 3), "preemptions": preemptions}

    def all_sampled(self) -> None:
        self._until = round(time.perf_counter() - self._began, 3)

    def take(self) -> dict[str, Any] | None:
        """Return the round's event, or None if this rank hasn't sampled since the last `take`."""
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


def curve(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[list[float]]:
    if len(points) > most:
        last = len(points) - 1
        points = [points[index * last // (most - 1)] for index in range(most)]
    return [[round(at, 3), round(value, 3)] for at, value in points]


def tail(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the time, in seconds, when the number of running sequences last fell below half of its maximum."""
    most = max((value for _, value in points), default=0)
    if not most:
        return None
    after = next((index for index in range(len(points), 0, -1) if points[index - 1][1] >= most / 2), 0)
    return round(points[min(after, len(points) - 1)][0], 3)


def merged(
    calls: Sequence[tuple[str, float, float, int]], most: int = MOST_CALLS
) -> list[tuple[str, float, float, int]]:
    """Sort calls by start. If over ``most``: keep the first ``most`` names, and merge successive calls of a name."""
    of_names: dict[str, list[tuple[str, float, float, int]]] = {}
    for call in sorted(calls, key=lambda call: call[1]):
        of_names.setdefault(call[0], []).append(call)
    result = []
    for name, own in [*of_names.items()][:most]:
        size = 1 if len(calls) <= most else -(-len(own) // max(1, most // len(of_names)))
        for part in (own[start : start + size] for start in range(0, len(own), size)):
            result.append((name, part[0][1], max(call[2] for call in part), sum(call[3] for call in part)))
    return sorted(result, key=lambda call: call[1])
