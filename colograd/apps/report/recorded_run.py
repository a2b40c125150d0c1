"""A run's folder as plain data: its recorded events, or without events the history in `trainer_state.json`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...extensions.recording.event_log import PROMPT_CHARACTERS
from .samples import Samples
from .untrusted import Tail, entries, items, mapping, number, open_inside, parse, plain, text, texts, whole

EVENTS = "_report/events.jsonl"
STATE = "trainer_state.json"
MOST_STATE_BYTES = 2**29
MOST_METRICS = 600
MOST_PROMPTS = 200_000
MOST_ALARMS = 500
MOST_REWARDS = 64
MOST_KNOBS = 2000
# An empty table of a step's groups. The columns: the prompt's index in `prompts`, position, number of completions,
# mean and spread of rewards, share of truncated completions, and 1 if the group has a learning signal.
NO_GROUPS = np.empty((0, 7))
OF_TRAINING_STEPS = ("reward", "loss", "grad_norm", "learning_rate", "step_time")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class Table:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # All rows use these string objects as keys, which saves memory.
        self.rows: dict[int, dict[str, float]] = {}

    def put(self, step: int, values: Mapping[str, Any]) -> None:
        row = self.rows.setdefault(step, {})
        for name, value in values.items():
            found, name = number(value), text(name, 200)
            if found is not None and (name in self.names or len(self.names) < MOST_METRICS):
                row[self.names.setdefault(name, name)] = found

    def columns(self) -> tuple[list[int], dict[str, list[float | None]]]:
        steps = sorted(self.rows)
        return steps, {name: [self.rows[step].get(name) for step in steps] for name in self.names}


class RecordedRun:
    """The data in a run's folder as of the last `refresh`. The folder may not exist yet."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.change = 0  # Number of refreshes that found new data.
        self._events = Tail(self.folder, EVENTS)
        self._state_seen: tuple[str, int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.steps, self.evaluations = Table(), Table()
        self.totals: dict[str, float] = {}
        self.starts: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.memory: list[dict[str, Any]] = []
        self.rollouts: dict[int, dict[int, bytes]] = defaultdict(dict)  # Step -> rank -> compressed event `rollout`.
        self.spreads: dict[int, dict[str, Any]] = {}
        self.groups: dict[int, np.ndarray] = {}  # Step -> rows with the columns of `NO_GROUPS`.
        self.prompts: dict[str, int] = {}  # Key of a prompt -> its index, in order of appearance.
        self.texts: dict[str, str] = {}  # Key of a prompt -> the beginning of its text.
        self.alarms: list[dict[str, Any]] = []
        self.last_time: float | None = None
        self.changed: dict[int, int] = {}  # Step -> `change` when the step last got data.
        self.samples = Samples(self.folder)

    @property
    def start(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        return max(self.steps.rows, default=0)

    def refresh(self) -> bool:
        self.change += 1
        fresh = False
        if self._events.restarted():
            self._events, self._state_seen, fresh = Tail(self.folder, EVENTS), None, True
            self._forget()
        for line in self._events.read():
            fresh = True
            if (event := parse(line, b'{"kind"')) is None:
                continue
            time, step = number(event.get("time"), 14), whole(event.get("step"))
            self.last_time = self.last_time if time is None else time
            if step is not None:
                with contextlib.suppress(Exception):  # A line that raises wasn't written by Colograd, so skip it.
                    self._take(step, event)
        if touched := self.samples.refresh():
            fresh, self.changed = True, self.changed | dict.fromkeys(touched, self.change)
        if not self.steps.rows or self._state_seen is not None:
            fresh = self._refresh_state() or fresh
        if not fresh:
            self.change -= 1
        return fresh

    def _take(self, step: int, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "start":
                if step == 0 and not event.get("resumed") and self.steps.rows:  # A new run has begun in this folder.
                    self._forget()
                known = {name: plain(event.get(name)) for name in ("step", "max_steps", "resumed", "time")}
                self.starts.append(known | {"run": _described(event.get("run"))})
                del self.starts[:-64]
                self.end = None
                rows = [mapping(row) for row in items(event.get("memory"))[:64]]
                sizes = ("sampling", "training")
                self.memory = [{"part": text(r.get("part"), 200)} | {n: number(r.get(n)) for n in sizes} for r in rows]
                self.alarms = [alarm for alarm in self.alarms if alarm["step"] <= step]
                for alarm in self.alarms:
                    if alarm.get("until", 0) > step:
                        del alarm["until"]
            case "log":
                self.take_metrics(step, event["metrics"])
            case "rollout":
                names = ("seconds", "preemptions", "tail", "until")
                of_rank: dict[str, Any] = {name: number(event.get(name)) for name in names}
                for name in ("running", "waiting", "kv"):
                    of_rank[name] = [[number(at, 4), number(value, 4)] for at, value in event[name][:100]]
                for name in ("rewards", "tools", "trained"):
                    calls = items(event.get(name))[:64]
                    of_rank[name] = [[text(function, 100), *map(number, span)] for function, *span in calls]
                if (rank := whole(event["rank"])) is not None and rank < 4096:
                    self.rollouts[step][rank] = zlib.compress(json.dumps(of_rank).encode())
                    self.changed[step] = self.change
            case "spread":
                found: dict[str, Any] = {"functions": {}}
                for name in ("rewards", "lengths"):
                    given = mapping(event.get(name))
                    edges, counts = ([number(each, 4) for each in items(given.get(at))] for at in ("edges", "counts"))
                    if counts and len(edges) == len(counts) + 1 <= 129 and None not in (*edges, *counts):
                        found[name] = {"edges": edges, "counts": counts}
                for name, (least, most) in [*mapping(event.get("functions")).items()][:MOST_REWARDS]:
                    found["functions"][str(name)] = [number(least, 4), number(most, 4)]
                self.spreads[step] = {name: value for name, value in found.items() if value}
            case "groups":
                flat: list[list[float]] = []
                for key, position, size, mean, spread, truncated, signal, *beginning in event["groups"][:512]:
                    prompt = text(key[:64])
                    if prompt not in self.prompts and len(self.prompts) >= MOST_PROMPTS:
                        continue
                    if beginning:
                        self.texts[prompt] = text(beginning[0], PROMPT_CHARACTERS)
                    numbers = map(number, (position, size, mean, spread, truncated, signal))
                    place = self.prompts.setdefault(prompt, len(self.prompts))
                    flat.append([place, *(math.nan if value is None else value for value in numbers)])
                self.groups[step] = np.array(flat).reshape(-1, 7)
                self.changed[step] = self.change
            case "alarm" if len(self.alarms) < MOST_ALARMS:
                texts_of = {name: text(event.get(name)) for name in ("rule", "seen", "why", "remedy", "source")}
                severity = event["severity"] if event["severity"] in ("severe", "note") else "warning"
                self.alarms.append({"step": step, "severity": severity, **texts_of})
            case "calm":
                for alarm in self.alarms:
                    if alarm["rule"] == event["rule"]:
                        alarm.setdefault("until", step)
            case "end":
                status = event["status"] if event["status"] in ("finished", "stopped", "failed") else "stopped"
                self.end = {"step": step, "status": status, "error": text(event.get("error"))}

    def take_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        rest = {name: value for name, value in metrics.items() if name not in evaluated and name != "step"}
        if evaluated:
            self.evaluations.put(step, evaluated)
        if "train_runtime" in rest:
            self.totals = {name: found for name, value in rest.items() if (found := number(value)) is not None}
        elif any(name in rest for name in OF_TRAINING_STEPS):
            self.steps.put(step, rest)

    def _refresh_state(self) -> bool:
        """Read `log_history` from a trainer_state.json: the run's own, else the newest readable one of a checkpoint.

        Return whether there was a new history.
        """
        names = [STATE]
        with contextlib.suppress(OSError):
            found = [match for path in self.folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
            names += [f"{match.group()}/{STATE}" for match in sorted(found, key=lambda match: -int(match.group(1)))]
        for name in names:
            if (file := open_inside(self.folder, name)) is None:
                continue
            state = None
            with file, contextlib.suppress(ValueError, RecursionError):
                about = os.fstat(file.fileno())
                seen = (name, about.st_mtime_ns, about.st_size)
                if seen == self._state_seen:
                    return False
                state = json.load(file) if about.st_size <= MOST_STATE_BYTES else None
            if not isinstance(state, dict):
                continue
            self._state_seen = seen
            for entry in items(state.get("log_history")):
                step = whole(mapping(entry).get("step"))
                if step is not None:
                    self.take_metrics(step, entry)
            if not self.starts or "run" not in self.starts[0]:
                limit = plain(state.get("max_steps"))
                self.starts = [{"step": 0, "max_steps": limit, "resumed": False, "time": None, "run": _described(None)}]
            if name == STATE and self.totals:
                self.end = {"step": self.last_step, "status": "finished", "error": ""}
            return True
        return False


_BOUNDED_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "device", "command", "peak_source"), text),
    **dict.fromkeys(("parameters", "trained_parameters", "layers", "hidden", "ranks", "peak_flops"), number),
    **dict.fromkeys(("datasets", "reward_names"), lambda value: texts(value, 256, 500)),
    "changed": lambda value: texts(value, MOST_KNOBS, 200),
    "reward_weights": lambda value: [number(item) for item in items(value)[:256]],
    "versions": lambda value: entries(value, 64, lambda version: text(version, 200)),
    "settings": lambda value: entries(value, MOST_KNOBS, plain),
}


def _described(run: Any) -> dict[str, Any]:
    return {name: bounded(mapping(run).get(name)) for name, bounded in _BOUNDED_FIELDS.items()}
