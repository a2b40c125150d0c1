"""`Timeline`: a record of the sampling on one rank: engine load, calls of rewards and tools, training during the tail.

The engine, the rewards and the tools call hooks, which are None if nothing is recorded. A sample of the engine's load
costs microseconds. The size of the record doesn't grow with the length of the sampling.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...engine.load import Load

POINTS = 100  # Maximum number of points of a curve.
CALLS = 64  # Maximum number of recorded reward calls, and of tool calls.
KEPT = 4096  # Number of load samples at which every second sample is dropped.


class Timeline:
    """A record of the time between `begin` and `take`. `take_early` adds the time until all ranks have sampled."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last_began: float | None = None  # start time of this rank's last sampling
        self._early: list[tuple[str, float, float, int]] = []
        self._until: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._looks: list[tuple[float, Load]] = []
        self._last: tuple[float, Load] | None = None
        self._every, self._steps = 1, 0  # every how many engine steps a sample is kept; number of engine steps so far
        self._rewards: list[tuple[str, float, float, int]] = []
        self._tools: list[tuple[str, float, float, int]] = []

    def begin(self) -> None:
        self._forget()
        self._early, self._until = [], None
        self._began = self._last_began = time.perf_counter()

    def look(self, load: Load) -> None:
        """Record the engine's load after an engine step."""
        if self._began is None:
            return
        self._last = (time.perf_counter() - self._began, load)
        if self._steps % self._every == 0:
            if len(self._looks) == KEPT:
                self._looks, self._every = self._looks[::2], 2 * self._every
            self._looks.append(self._last)
        self._steps += 1

    def reward(self, name: str, started: float, ended: float, completions: int) -> None:
        """Record a call of a reward function, with times of `time.perf_counter`. Any thread may call this method."""
        if (began := self._began) is not None:
            self._rewards.append((name, started - began, ended - began, completions))

    def tool(self, name: str, started: float, ended: float) -> None:
        if (began := self._began) is not None:
            self._tools.append((name, started - began, ended - began, 1))

    def early(self, started: float, ended: float, tokens: int) -> None:
        """Record a training of finished groups while other ranks sampled. ``tokens``: number of trained tokens."""
        if (began := self._last_began) is not None:
            self._early.append(("train", started - began, ended - began, tokens))

    def all_sampled(self) -> None:
        if self._last_began is not None:
            self._until = time.perf_counter() - self._last_began

    def take_early(self) -> dict[str, Any]:
        """Return the training during sampling, and the seconds until all ranks had sampled, for the "rollout" event."""
        trained, self._early = self._early, []
        until = None if self._until is None else round(self._until, 3)
        return {"trained": _shown(trained), "until": until}

    def take(self, preemptions: int | None) -> dict[str, Any]:
        """End the record of a sampling. Return the contents of its "rollout" event."""
        assert self._began is not None
        seconds, self._began = time.perf_counter() - self._began, None
        if self._last is not None and self._looks[-1] is not self._last:
            self._looks.append(self._last)
        found = {
            "seconds": round(seconds, 3),
            "running": curve([(at, load.running) for at, load in self._looks]),
            "waiting": curve([(at, load.waiting) for at, load in self._looks]),
            "kv": curve([(at, load.cache) for at, load in self._looks]),
            "preemptions": preemptions,
            "tail": tail([(at, load.running) for at, load in self._looks]),
            "rewards": _shown(self._rewards),
            "tools": [call[:3] for call in _shown(self._tools)],
        }
        self._forget()
        return found


def _shown(calls: Sequence[tuple[str, float, float, int]]) -> list[list[Any]]:
    return [[n, round(max(a, 0.0), 3), round(max(b, a, 0.0), 3), count] for n, a, b, count in merged(calls)]


def curve(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[list[float]]:
    """Return at most ``most`` of the points, evenly chosen, with the first and the last point."""
    if len(points) > most:
        last = len(points) - 1
        points = [points[index * last // (most - 1)] for index in range(most)]
    return [[round(at, 3), round(value, 3)] for at, value in points]


def tail(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the time when fewer than half of the maximum number of sequences ran for good. None if none ran."""
    most = max((value for _, value in points), default=0)
    if not most:
        return None
    after = next((index for index in range(len(points), 0, -1) if points[index - 1][1] >= most / 2), 0)
    return round(points[min(after, len(points) - 1)][0], 3)


def merged(calls: Sequence[tuple[str, float, float, int]], most: int = CALLS) -> list[tuple[str, float, float, int]]:
    """Sort calls by start. If there are more than ``most``, merge neighbours of one name and add up completions."""
    found = sorted(calls, key=lambda call: call[1])
    names = list(dict.fromkeys(call[0] for call in found))
    each = max(1, most // max(len(names), 1))
    if len(found) <= most:
        return found
    result = []
    for name in names[:most]:
        own = [call for call in found if call[0] == name]
        size = -(-len(own) // each)
        for start in range(0, len(own), size):
            part = own[start : start + size]
            result.append((name, part[0][1], max(call[2] for call in part), sum(call[3] for call in part)))
    return sorted(result, key=lambda call: call[1])
