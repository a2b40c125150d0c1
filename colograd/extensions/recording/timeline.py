"""`Timeline`: a record of the sampling on one rank: engine load, calls of rewards and tools, training during the tail.

`Recorder.watching` lets the engine, the reward functions and the tools call its methods. A call costs microseconds. The
event that `take` returns has a bounded size, however long the sampling took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...engine.load import Load

POINTS = 100  # Maximum number of points of a curve.
CALLS = 64  # Maximum number of recorded reward calls, and of tool calls.


class Timeline:
    """A record of one round of sampling on this rank, from `begin` to `end`. Times are seconds since `begin`."""

    def __init__(self) -> None:
        self.begin()
        self._records = False  # Whether the sampling lasts.

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

    def reward(self, name: str, started: float, ended: float, completions: int) -> None:
        """Record a call of a reward function, with times of `time.perf_counter`. Any thread may call this method."""
        if self._records:
            self._calls["rewards"].append((name, started - self._began, ended - self._began, completions))

    def tool(self, name: str, started: float, ended: float) -> None:
        if self._records:
            self._calls["tools"].append((name, started - self._began, ended - self._began, 1))

    def early(self, started: float, ended: float, tokens: int) -> None:
        """Record that this rank trained ``tokens`` tokens of finished groups while other ranks sampled."""
        self._calls["trained"].append(("train", started - self._began, ended - self._began, tokens))

    def end(self, preemptions: int | None) -> None:
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
    found, result = sorted(calls, key=lambda call: call[1]), []
    if len(found) <= most:
        return found
    names = list(dict.fromkeys(call[0] for call in found))
    for name in names[:most]:
        own = [call for call in found if call[0] == name]
        size = -(-len(own) // max(1, most // len(names)))
        for part in (own[start : start + size] for start in range(0, len(own), size)):
            result.append((name, part[0][1], max(call[2] for call in part), sum(call[3] for call in part)))
    return sorted(result, key=lambda call: call[1])
