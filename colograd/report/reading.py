"""A run's folder as plain data: its events, and for runs without them what `trainer_state.json` holds.

`Run.refresh` reads only what is new since the last look, and numbers each change: `colograd watch` sends a page what
changed after the number that it has. Memory is bounded by steps, not by completions: what a rollout did is kept packed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .lines import Tail, open_inside, parse
from .samples import Samples
from .values import items, mapping, number, plain, text, whole

EVENTS = "_report/events.jsonl"
STATE = "trainer_state.json"
MOST_STATE = 2**29  # bytes of a trainer_state.json
MOST_NAMES = 600  # metrics
MOST_PROMPTS = 200_000  # whose history is kept
MOST_ALARMS = 500
MOST_LIMITS = 64  # reward functions of a step
MOST_KNOBS = 2000
GROUP_WIDTH = 7  # numbers of a group: prompt, position, G, mean reward, spread, truncated share, carries signal
TRAINING = ("reward", "loss", "grad_norm", "learning_rate", "step_time")  # one of them marks a training step's entry
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class Table:
    """Numbers by step and name, a row of machine floats each, with the change that last touched it."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.rows: dict[int, array[float]] = {}
        self.changed: dict[int, int] = {}

    def put(self, step: int, values: Mapping[str, Any], change: int) -> None:
        """Set numbers of a step. Of two of one name the later counts."""
        row = self.rows.setdefault(step, array("d"))
        for name, value in values.items():
            found = number(value)
            if found is None or (name not in self.names and len(self.names) >= MOST_NAMES):
                continue
            place = self.names.setdefault(text(name, 200), len(self.names))
            row.extend([math.nan] * (place + 1 - len(row)))
            row[place] = found
        self.changed[step] = change

    def columns(self, after: int = 0) -> tuple[list[int], dict[str, list[float | None]]]:
        """The steps that changed after a change, in order, and each name's values there."""
        steps = sorted(step for step, change in self.changed.items() if change > after)
        found = {name: [self._value(step, place) for step in steps] for name, place in self.names.items()}
        return steps, {name: values for name, values in found.items() if any(value is not None for value in values)}

    def _value(self, step: int, place: int) -> float | None:
        row = self.rows[step]
        value = row[place] if place < len(row) else math.nan
        return None if math.isnan(value) else value


class Run:
    """What is known of a run. `refresh` looks again.

    Args:
        folder: the run's output_dir. It needn't be there yet.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.change = 0  # counts the looks that found something
        self.born = 0  # the change with which everything began anew
        self._events = Tail(self.folder, EVENTS)
        self._state_seen: tuple[str, int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.steps, self.evaluations = Table(), Table()
        self.totals: dict[str, float] = {}  # of the whole run, logged at its end
        self.starts: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.memory: list[dict[str, Any]] = []
        self.rollouts: dict[int, dict[int, bytes]] = defaultdict(dict)  # by step and rank, packed
        self.spreads: dict[int, dict[str, Any]] = {}
        self.groups: dict[int, array[float]] = {}  # GROUP_WIDTH numbers each
        self.prompts: dict[str, int] = {}  # keys, numbered
        self.alarms: list[dict[str, Any]] = []
        self.last_time: float | None = None
        self.touched: dict[str, dict[int, int]] = defaultdict(dict)  # of spreads, groups and rollouts: step -> change
        self.samples = Samples(self.folder)

    @property
    def name(self) -> str:
        return text(self.folder.name, 200) or "run"

    @property
    def start(self) -> dict[str, Any]:
        """The last start's own description."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        return max(self.steps.rows, default=0)

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        self.change += 1
        fresh = False
        if self._events.restarted() or self.samples.restarted():
            self._events, self.born, fresh = Tail(self.folder, EVENTS), self.change, True
            self._state_seen = None
            self._forget()
        for _, line in self._events.read():
            fresh = True
            if (event := parse(line, b'{"kind"')) is not None:
                self._take(event)
        fresh = self.samples.refresh(self.change) or fresh
        if not self.steps.rows or self._state_seen is not None:
            fresh = self._refresh_state() or fresh
        if not fresh:
            self.change -= 1
        return fresh

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        handler = _HANDLERS.get(kind) if isinstance(kind, str) else None
        step = whole(event.get("step"))
        time = number(event.get("time"), 14)
        self.last_time = time if time is not None else self.last_time
        if handler is not None and step is not None:
            handler(self, step, event)

    def _take_start(self, step: int, event: dict[str, Any]) -> None:
        if step == 0 and not event.get("resumed") and self.steps.rows:  # another run in the same folder
            samples = self.samples
            self._forget()
            self.born, self.samples = self.change, samples
        known = ("step", "max_steps", "resumed", "time")
        self.starts.append({name: plain(event.get(name)) for name in known} | {"run": _described(event.get("run"))})
        del self.starts[:-64]
        self.end = None
        self.memory = [
            {
                "part": text(row.get("part"), 200),
                "sampling": number(row.get("sampling")),
                "training": number(row.get("training")),
            }
            for row in items(event.get("memory"))[:64]
            if isinstance(row, dict)
        ]
        for alarm in self.alarms:  # what was wrong before a stop is told anew if it still is
            alarm.setdefault("until", step)

    def _take_log(self, step: int, event: dict[str, Any]) -> None:
        self.take_metrics(step, mapping(event.get("metrics")))

    def take_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """What a trainer logged at a step: of a training step, of an evaluation, or of the whole run."""
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        rest = {name: value for name, value in metrics.items() if name not in evaluated and name != "step"}
        if evaluated:
            self.evaluations.put(step, evaluated, self.change)
        if "train_runtime" in rest:
            self.totals = {name: found for name, value in rest.items() if (found := number(value)) is not None}
        elif any(name in rest for name in TRAINING):
            self.steps.put(step, rest, self.change)

    def _take_rollout(self, step: int, event: dict[str, Any]) -> None:
        rank = whole(event.get("rank"))
        if rank is not None and rank < 4096:
            self.rollouts[step][rank] = zlib.compress(json.dumps(_rollout(event), separators=(",", ":")).encode(), 6)
            self.touched["rollouts"][step] = self.change

    def _take_spread(self, step: int, event: dict[str, Any]) -> None:
        found: dict[str, Any] = {name: _histogram(event.get(name)) for name in ("rewards", "lengths")}
        found["functions"] = _limits(event.get("functions"))
        self.spreads[step] = {name: value for name, value in found.items() if value}
        self.touched["spreads"][step] = self.change

    def _take_groups(self, step: int, event: dict[str, Any]) -> None:
        found = array("d")
        for row in items(event.get("groups"))[:512]:
            if not isinstance(row, list) or len(row) < GROUP_WIDTH or not isinstance(row[0], str):
                continue
            known = self.prompts.get(row[0][:64])
            if known is None:
                if len(self.prompts) >= MOST_PROMPTS:
                    continue
                known = self.prompts[text(row[0][:64])] = len(self.prompts)
            numbers = [number(value) for value in row[1:GROUP_WIDTH]]
            found.extend([known, *(math.nan if value is None else value for value in numbers)])
        self.groups[step] = found
        self.touched["groups"][step] = self.change

    def _take_alarm(self, step: int, event: dict[str, Any]) -> None:
        if len(self.alarms) < MOST_ALARMS:
            told = {name: text(event.get(name)) for name in ("rule", "seen", "why", "remedy", "source")}
            severity = "severe" if event.get("severity") == "severe" else "warning"
            self.alarms.append({"step": step, "severity": severity, **told})

    def _take_calm(self, step: int, event: dict[str, Any]) -> None:
        for alarm in self.alarms:
            if alarm["rule"] == event.get("rule"):
                alarm.setdefault("until", step)

    def _take_end(self, step: int, event: dict[str, Any]) -> None:
        status = event.get("status")
        self.end = {
            "step": step,
            "status": status if status in ("finished", "stopped", "failed") else "stopped",
            "error": text(event.get("error")),
        }

    def _refresh_state(self) -> bool:
        """Take `log_history` of the run's own trainer_state.json, or of its newest checkpoint's."""
        for name in self._state_names():
            if (file := open_inside(self.folder, name)) is None:
                continue
            with file:
                found = os.fstat(file.fileno())
                seen = (name, found.st_mtime_ns, found.st_size)
                if seen == self._state_seen:
                    return False
                state = None
                with contextlib.suppress(ValueError, RecursionError):
                    state = json.load(file) if found.st_size <= MOST_STATE else None
            if isinstance(state, dict):
                self._state_seen = seen
                self._take_state(state, finished=name == STATE)
                return True
        return False

    def _state_names(self) -> Iterator[str]:
        yield STATE
        with contextlib.suppress(OSError):
            found = [match for path in self.folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
            for match in sorted(found, key=lambda match: -int(match.group(1))):
                yield f"{match.group()}/{STATE}"

    def _take_state(self, state: dict[str, Any], finished: bool) -> None:
        for entry in items(state.get("log_history")):
            step = whole(mapping(entry).get("step"))
            if step is not None:
                self.take_metrics(step, entry)
        if not self.starts or "run" not in self.starts[0]:
            limit = plain(state.get("max_steps"))
            self.starts = [{"step": 0, "max_steps": limit, "resumed": False, "time": None, "run": _described(None)}]
        if finished and self.totals:
            self.end = {"step": self.last_step, "status": "finished", "error": ""}

    def groups_of(self, step: int) -> list[list[float]]:
        """A step's groups, GROUP_WIDTH numbers each."""
        flat = self.groups.get(step, array("d"))
        return [list(flat[at : at + GROUP_WIDTH]) for at in range(0, len(flat), GROUP_WIDTH)]

    def rollouts_of(self, step: int) -> list[dict[str, Any]]:
        """What each rank's rollout of a round did, in the order of the ranks."""
        of_step = self.rollouts.get(step, {})
        return [{"rank": rank, **json.loads(zlib.decompress(of_step[rank]))} for rank in sorted(of_step)]


_HANDLERS: dict[str, Callable[[Run, int, dict[str, Any]], None]] = {
    "start": Run._take_start,
    "log": Run._take_log,
    "rollout": Run._take_rollout,
    "spread": Run._take_spread,
    "groups": Run._take_groups,
    "alarm": Run._take_alarm,
    "calm": Run._take_calm,
    "end": Run._take_end,
}


def _described(run: Any) -> dict[str, Any]:
    """A start's `run`: what a page shows of it, each of the type that it should have, and the knobs."""
    given = mapping(run)
    texts = {name: text(given.get(name)) for name in ("model", "device", "command", "peak_source")}
    numbers = ("parameters", "trained_parameters", "layers", "hidden", "ranks", "peak_flops")
    names = {
        name: [text(item, 500) for item in items(given.get(name))[:256] if isinstance(item, str)]
        for name in ("datasets", "reward_names")
    }
    changed = [text(item, 200) for item in items(given.get("changed"))[:MOST_KNOBS] if isinstance(item, str)]
    versions = list(mapping(given.get("versions")).items())[:64]
    settings = list(mapping(given.get("settings")).items())[:MOST_KNOBS]
    return {
        **texts,
        **{name: number(given.get(name)) for name in numbers},
        **names,
        "changed": changed,
        "reward_weights": [number(item) for item in items(given.get("reward_weights"))[:256]],
        "versions": {text(name, 200): text(version, 200) for name, version in versions},
        "settings": {text(name, 200): plain(value) for name, value in settings},
    }


def _pairs(value: Any, most: int = 100) -> list[list[float]]:
    """[[t, n], ...] of finite numbers."""
    found = []
    for pair in items(value)[:most]:
        numbers = [number(part, 4) for part in items(pair)[:2]]
        if len(numbers) == 2 and None not in numbers:
            found.append(numbers)
    return found  # type: ignore[return-value]


def _spans(value: Any, width: int) -> list[list[Any]]:
    """[[name, t0, t1, ...], ...]."""
    found = []
    for row in items(value)[:64]:
        row = items(row)[:width]
        numbers = [number(part, 5) for part in row[1:]]
        if len(row) >= 3 and isinstance(row[0], str) and None not in numbers:
            found.append([text(row[0], 100), *numbers])
    return found


def _rollout(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: number(event.get(name)) for name in ("seconds", "preemptions", "tail")},
        **{name: _pairs(event.get(name)) for name in ("running", "waiting", "kv")},
        "rewards": _spans(event.get("rewards"), 4),
        "tools": _spans(event.get("tools"), 3),
    }


def _limits(value: Any) -> dict[str, list[float]]:
    """The least and the greatest of what each name had."""
    pairs = {str(name): [number(v, 4) for v in items(pair)] for name, pair in [*mapping(value).items()][:MOST_LIMITS]}
    return {name: pair for name, pair in pairs.items() if len(pair) == 2 and None not in pair}  # type: ignore[misc]


def _histogram(value: Any) -> dict[str, list[float]]:
    """Edges and counts that fit each other; nothing of what doesn't."""
    given = mapping(value)
    edges = [number(edge, 4) for edge in items(given.get("edges"))[:129]]
    counts = [whole(count) for count in items(given.get("counts"))[:128]]
    if len(edges) != len(counts) + 1 or not counts or None in edges or None in counts:
        return {}
    return {"edges": edges, "counts": counts}  # type: ignore[dict-item]
