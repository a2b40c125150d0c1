"""The JSON for a page: `overview` at the start, `of_step` when a step is opened."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .recorded_run import RecordedRun
from .untrusted import mapping, number, text, whole

POINTS = 2000  # points of a curve; with more steps, each point is the mean of several
MOST_SPREADS = 400  # steps with histograms
MOST_PROMPTS = 300  # prompts with a history on the page, by the largest reward difference
FLAT = 1e-6  # a group with a smaller spread of rewards has no reward difference
STEP_GROUPS = 256


def overview(run: RecordedRun, after: int = 0, thin: bool = True) -> dict[str, Any]:
    """Return the run without its completions, or what is new ``after`` a change of it; ``thin`` bounds the sizes."""
    if after < run.born:
        after = 0
    steps, columns = run.steps.columns(after)
    evaluated, of_evaluations = run.evaluations.columns(after)
    every = 1 if not thin else max(1, math.ceil(len(steps) / POINTS))
    touched = run.touched["spreads"].items()
    spreads = sorted((step for step, change in touched if change > after and step in run.spreads), reverse=True)
    each = 1 if not thin else max(1, math.ceil(len(spreads) / MOST_SPREADS))
    found: dict[str, Any] = {
        "name": text(run.folder.name, 200) or "run",
        "change": run.change,
        "whole": after == 0,  # the whole run, not only changes
        "status": status(run),
        "starts": [{name: value for name, value in start.items() if name != "run"} for start in run.starts],
        "run": mapping(run.start.get("run")),
        "memory": run.memory,
        "totals": run.totals,
        "alarms": run.alarms,
        "every": every,
        "steps": steps[every - 1 :: every] if every > 1 else steps,
        "columns": {name: _means(values, every) for name, values in columns.items()},
        "evaluations": {"steps": evaluated, "columns": of_evaluations},
        "spreads": {str(step): run.spreads[step] for step in sorted(spreads[::each])},
    }
    if any(change > after for change in run.touched["groups"].values()):
        found["groups"] = groups_over_time(run)
        found["prompts"] = prompt_histories(run)
        found["texts"] = _texts(run, (row[0] for row in found["prompts"]["shown"]))
    held = {step: 0 for kind in ("rollouts", "groups") for step, change in run.touched[kind].items() if change > after}
    held |= {step: 1 for step, change in run.samples.changed.items() if change > after}
    found["held"] = sorted([step, has] for step, has in held.items())  # 1: the step has completions
    return found


def status(run: RecordedRun) -> dict[str, Any]:
    limit = whole(run.start.get("max_steps"))
    end = run.end or {}
    return {
        "state": end.get("status") or ("running" if run.starts else "waiting"),
        "error": end.get("error", ""),
        "step": run.last_step,
        "max_steps": limit,
        "begun": run.starts[0].get("time") if run.starts else None,
        "seen": run.last_time,
        "recorded": bool(run.starts and run.starts[0].get("time")),  # by Colograd's recorder
    }


def of_step(run: RecordedRun, step: int, most_bytes: int) -> dict[str, Any]:
    """Return a step's rollouts, groups, and completions of about ``most_bytes``."""
    completions, left_out = run.samples.of_step(step, most_bytes) if most_bytes else ([], 0)
    prompts: list[Any] = []  # each prompt once: a group's completions share it
    places: dict[str, int] = {}
    for found in completions:
        prompt = found.pop("prompt")
        place = places.setdefault(repr(prompt), len(prompts))
        if place == len(prompts):
            prompts.append(prompt)
        found["prompt"] = place
    keys = list(run.prompts)
    groups = [
        [keys[int(group[0])], *(number(value, 4) for value in group[1:])]
        for group in run.groups_of(step)[:STEP_GROUPS]
        if not math.isnan(group[0])
    ]
    return {
        "step": step,
        "rollouts": run.rollouts_of(step),
        "groups": groups,
        "texts": _texts(run, (group[0] for group in groups)),
        "prompts": prompts,
        "completions": completions,
        "left_out": left_out,
    }


def _texts(run: RecordedRun, keys: Iterable[Any]) -> dict[str, str]:
    return {key: run.texts[key] for key in keys if key in run.texts}


def pass_mark(run: RecordedRun) -> float:
    """Return the mean reward from which a group without a reward difference is solved."""
    means = [group[3] for step in run.groups for group in run.groups_of(step) if not math.isnan(group[3])]
    mark = number(mapping(mapping(run.start.get("run")).get("settings")).get("pass_threshold_eval"))
    mark = 1.0 if mark is None else mark
    if not means or max(means) >= mark - FLAT:
        return mark
    return (min(means) + max(means)) / 2


def groups_over_time(run: RecordedRun) -> dict[str, Any]:
    """Count by step the solved, unsolved and mixed prompts, and the prompts with a training signal."""
    mark = pass_mark(run)
    found: dict[str, Any] = {"mark": number(mark), "steps": [], "solved": [], "unsolved": [], "mixed": [], "signal": []}
    for step in sorted(run.groups):
        counts = dict.fromkeys(("solved", "unsolved", "mixed", "signal"), 0)
        for _, _, _, mean, spread, _, signal in run.groups_of(step):
            if spread > FLAT:
                counts["mixed"] += 1
            elif not math.isnan(mean):
                counts["solved" if mean >= mark - FLAT else "unsolved"] += 1
            counts["signal"] += signal == 1
        found["steps"].append(step)
        for name, count in counts.items():
            found[name].append(count)
    return found


def prompt_histories(run: RecordedRun) -> dict[str, Any]:
    """Count the prompts, and return [key, spread in all, [[step, mean, spread, truncated share], ...]] of some."""
    spreads: dict[int, float] = defaultdict(float)
    visits: dict[int, int] = defaultdict(int)
    for step in run.groups:
        for key, _, _, _, spread, _, _ in run.groups_of(step):
            spreads[int(key)] += 0.0 if math.isnan(spread) else abs(spread)
            visits[int(key)] += 1
    order = sorted(visits, key=lambda key: (-spreads[key], -visits[key], key))
    shown = {key: place for place, key in enumerate(order[:MOST_PROMPTS])}
    histories: list[list[Any]] = [[] for _ in shown]
    for step in sorted(run.groups):
        for key, _, _, mean, spread, truncated, _ in run.groups_of(step):
            if (place := shown.get(int(key))) is not None:
                histories[place].append([step, number(mean, 4), number(spread, 4), number(truncated, 4)])
    keys = list(run.prompts)
    return {
        "total": len(visits),
        "visits": sum(visits.values()),
        "half": _half([*spreads.values()]),
        "shown": [[keys[key], number(spreads[key], 4), histories[place]] for key, place in shown.items()],
    }


def _half(amounts: Sequence[float]) -> int:
    """Count how many of the largest amounts make up half of the sum."""
    so_far = [0.0, *itertools.accumulate(sorted(amounts, reverse=True))]
    return bisect.bisect_left(so_far, so_far[-1] / 2)


def _means(values: Sequence[float | None], every: int) -> list[float | None]:
    """Average every ``every`` values; an incomplete last row is left out, as in the list of steps."""
    if every == 1:
        return list(values)
    found = []
    for at in range(0, len(values) - every + 1, every):
        known = [value for value in values[at : at + every] if value is not None]
        found.append(number(sum(known) / len(known)) if known else None)
    return found


def spread_out(steps: Iterable[int], first: Iterable[int] = ()) -> Iterator[int]:
    """Yield the steps, the ``first`` ones early; every beginning of the sequence is spread over the whole run."""
    rest = sorted(set(steps))
    order = [step for step in [*rest[-1:], *rest[:1], *first] if step in rest]
    for power in range(max(len(rest) - 1, 1).bit_length(), -1, -1):
        order += rest[:: 2**power]
    yield from dict.fromkeys(order)
