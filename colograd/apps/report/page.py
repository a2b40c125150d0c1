"""A report: one HTML file that loads nothing. Its content security policy allows only scripts with a known hash."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from .recorded_run import NO_GROUPS, RecordedRun
from .untrusted import mapping, number, text, whole

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "uplot/uPlot.iife.min.js", "base.js", "data.js", "charts.js", "overview.js", "time.js", "tokens.js",
    "completions.js", "groups.js", "advisor.js", "settings.js", "main.js",
)  # fmt: skip
STYLES = ("uplot/uPlot.min.css", "page.css")
NAME = "report.html"  # The model card links to a file of this name.

# A page holds compressed steps of about so many bytes: ROLLOUT_BYTES of steps without completions, COMPLETION_BYTES of
# steps with completions. Base64, in the page, adds a third.
ROLLOUT_BYTES = 900_000
COMPLETION_BYTES = 3_000_000
STEP_JSON_BYTES = 2_000_000
POINTS = 2000
MOST_SPREADS = 400
MOST_PROMPTS = 300
FLAT = 1e-6  # A group's rewards count as equal if their spread is at most this.
STEP_GROUPS = 256


def report(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="colograd report",
        description="One self-contained HTML file that shows what a run did, or several runs side by side.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir")
    parser.add_argument("--out", type=Path, help=f"the file; default {NAME} in the first run's folder")
    options = parser.parse_args(argv)
    path = write_report(*options.runs, out=options.out)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0


def write_report(run_dir: str | Path, *others: str | Path, out: str | Path | None = None) -> Path:
    """Write a report of one or several runs, and return its path. A failure leaves no incomplete file.

    Args:
        run_dir: output_dir of the first run. The run may be unfinished, or have only a trainer_state.json.
        others: output_dirs of further runs, shown side by side with the first.
        out: path of the report; by default ``report.html`` in ``run_dir``.
    """
    runs = [read_run(folder) for folder in (run_dir, *others)]
    path = Path(out) if out is not None else Path(run_dir) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_text(page(runs), encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def read_run(folder: str | Path) -> RecordedRun:
    run = RecordedRun(folder)
    run.refresh()
    if not (run.starts or run.steps.rows or run.evaluations.rows or run.samples.steps):
        raise ValueError(
            f"{folder} holds nothing to report: no _report/events.jsonl, no trainer_state.json (in the folder or "
            "a checkpoint) and no completions. Give the output_dir of a run that was trained with `report: true`."
        )
    return run


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML page of runs, as of each run's last `refresh`."""
    data, blocks = [], []
    for place, run in enumerate(runs):
        found, alarms = overview(run), [int(alarm["step"]) for alarm in run.alarms[:20]]
        packed: dict[int, bytes] = {}
        recorded, held = {*run.samples.steps}, []
        # Remaining bytes for steps without completions, and for steps with completions.
        rooms = [ROLLOUT_BYTES // len(runs), COMPLETION_BYTES // len(runs)]
        for step in spread_out(dict(found["held"]), alarms):
            kind = int(step in recorded and rooms[1] > 0)
            if rooms[kind] > 0:
                content = of_step(run, step, min(STEP_JSON_BYTES, 8 * rooms[1]) if kind else 0)
                packed[step] = zlib.compress(compact(content).encode(), 9)
                rooms[kind] -= len(packed[step])
                held.append([step, kind])
        for step in sorted(packed):
            block = base64.b64encode(packed[step]).decode()
            blocks.append(f'<script type="text/plain" id="step-{place}-{step}">{block}</script>')
        del found["changed"]  # Only a live page needs the steps' last changes.
        found["held"] = sorted(held)
        found["chosen"] = [sum(kind for _, kind in held), len(recorded)]
        data.append(found)
    return document({"live": False, "version": __version__, "runs": data}, "\n".join(blocks))


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def document(data: dict[str, Any], blocks: str = "", connect: str = "'none'") -> str:
    """Return the page's HTML.

    Args:
        data: overviews of the runs, which the page's scripts read as JSON.
        blocks: HTML elements with the compressed data of single steps.
        connect: addresses from which scripts may load data (`connect-src` of the content security policy).
    """
    # Scripts and styles aren't escaped, so their files may not contain an end tag.
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, style)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    escaped = compact(data)  # `<` could end the script element. In JavaScript U+2028 and U+2029 are line ends.
    for character in "<>&\u2028\u2029":
        escaped = escaped.replace(character, f"\\u{ord(character):04x}")
    parts = {"POLICY": policy, "STYLE": style, "DATA": escaped, "BLOCKS": blocks, "SCRIPT": script}
    parts["VERSION"] = __version__
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)


def overview(run: RecordedRun) -> dict[str, Any]:
    """Return a run's data without completions. Each point of a long curve is the mean of several steps."""
    (steps, columns), (evaluated, of_evaluations) = run.steps.columns(), run.evaluations.columns()
    every, spreads = max(1, math.ceil(len(steps) / POINTS)), sorted(run.spreads, reverse=True)
    spreads = spreads[:: max(1, math.ceil(len(spreads) / MOST_SPREADS))]
    end, begun = run.end or {}, run.starts[0].get("time") if run.starts else None
    completed = {*run.samples.steps}
    return {
        "name": text(run.folder.name, 200) or "run",
        "change": run.change,
        "status": {
            "state": end.get("status") or ("running" if run.starts else "waiting"),
            "error": end.get("error", ""),
            "step": run.last_step,
            "max_steps": whole(run.start.get("max_steps")),
            "begun": begun,
            "seen": run.last_time,
            "recorded": bool(begun),  # Only a run that Colograd recorded has a time.
        },
        "starts": [{name: value for name, value in start.items() if name != "run"} for start in run.starts],
        "run": mapping(run.start.get("run")),
        "memory": run.memory,
        "totals": run.totals,
        "alarms": run.alarms,
        "every": every,
        "steps": steps[every - 1 :: every],
        "columns": {name: _means(values, every) for name, values in columns.items()},
        "evaluations": {"steps": evaluated, "columns": of_evaluations},
        "spreads": {str(step): run.spreads[step] for step in spreads},
        "groups": groups_over_time(run),
        "prompts": (prompts := prompt_histories(run)),
        "texts": _texts(run, (row[0] for row in prompts["shown"])),
        # Pairs (step, 1 if the step has completions, else 0).
        "held": sorted({step: int(step in completed) for step in {*run.rollouts, *run.groups, *completed}}.items()),
        "changed": run.changed,
    }


def of_step(run: RecordedRun, step: int, most_bytes: int) -> dict[str, Any]:
    """Return a step's groups, a record of each rank's sampling, and completions up to about ``most_bytes``."""
    completions, left_out = run.samples.of_step(step, most_bytes) if most_bytes else ([], 0)
    prompts: list[Any] = []  # Each prompt once: a group's completions share it.
    places: dict[str, int] = {}
    for found in completions:
        place = places.setdefault(repr(found["prompt"]), len(prompts))
        if place == len(prompts):
            prompts.append(found["prompt"])
        found["prompt"] = place
    keys, rows = list(run.prompts), run.groups.get(step, NO_GROUPS)[:STEP_GROUPS].tolist()
    groups = [[keys[int(prompt)], *(number(value, 4) for value in values)] for prompt, *values in rows]
    of_ranks = sorted(run.rollouts.get(step, {}).items())
    return {
        "step": step,
        "rollouts": [{"rank": rank, **json.loads(zlib.decompress(packed))} for rank, packed in of_ranks],
        "groups": groups,
        "texts": _texts(run, (group[0] for group in groups)),
        "prompts": prompts,
        "completions": completions,
        "left_out": left_out,
    }


def _texts(run: RecordedRun, keys: Iterable[Any]) -> dict[str, str]:
    return {key: run.texts[key] for key in keys if key in run.texts}


def pass_mark(run: RecordedRun) -> float:
    """Return the reward threshold. A group whose rewards are all equal counts as solved if they reach the threshold."""
    means = np.concatenate([NO_GROUPS, *run.groups.values()])[:, 3]
    means = means[~np.isnan(means)]
    mark = number(mapping(mapping(run.start.get("run")).get("settings")).get("pass_threshold_eval"))
    mark = 1.0 if mark is None else mark
    return mark if not len(means) or means.max() >= mark - FLAT else float(means.min() + means.max()) / 2


def groups_over_time(run: RecordedRun) -> dict[str, Any]:
    mark, counts = pass_mark(run), []
    for step in sorted(run.groups):
        _, _, _, mean, spread, _, signal = run.groups[step].T
        alike = ~np.isnan(mean) & ~(spread > FLAT)
        solved = alike & (mean >= mark - FLAT)
        counts.append([int(each.sum()) for each in (solved, alike & ~solved, spread > FLAT, signal == 1)])
    columns = np.array(counts, int).reshape(-1, 4).T.tolist()
    of_kinds = dict(zip(("solved", "unsolved", "mixed", "signal"), columns, strict=True))
    return {"mark": number(mark), "steps": sorted(run.groups), **of_kinds}


def prompt_histories(run: RecordedRun) -> dict[str, Any]:
    """Return the numbers of prompts and groups, and histories of the prompts with the largest sums of reward spreads.

    A history has an entry per group: [step, mean reward, spread of rewards, share of truncated completions].
    """
    steps, names = sorted(run.groups), list(run.prompts)
    rows = np.concatenate([NO_GROUPS, *(run.groups[step] for step in steps)])
    of_rows, keys = [step for step in steps for _ in run.groups[step]], rows[:, 0].astype(int)
    visits = np.bincount(keys, minlength=len(names))
    spreads = np.bincount(keys, np.abs(np.nan_to_num(rows[:, 4])), minlength=len(names))
    shown = []
    for key in np.lexsort((-visits, -spreads))[:MOST_PROMPTS]:
        history = [
            [of_rows[place], *(number(value, 4) for value in rows[place, 3:6].tolist())]
            for place in np.flatnonzero(keys == key)
        ]
        shown.append([names[key], number(float(spreads[key]), 4), history])
    return {"total": len(names), "visits": len(rows), "half": _half(spreads.tolist()), "shown": shown}


def _half(amounts: Sequence[float]) -> int:
    """Return how many of the largest amounts add up to half of the total."""
    so_far = np.cumsum([0.0, *sorted(amounts, reverse=True)])
    return int(np.searchsorted(so_far, so_far[-1] / 2))


def _means(values: Sequence[float | None], every: int) -> list[float | None]:
    """Return the means of blocks of ``every`` values. An incomplete last block is left out."""
    found = []
    for at in range(0, len(values) - every + 1, every):
        known = [value for value in values[at : at + every] if value is not None]
        found.append(number(sum(known) / len(known)) if known else None)
    return found


def spread_out(steps: Iterable[int], first: Iterable[int] = ()) -> Iterator[int]:
    """Yield each step once: the last, the earliest, those in ``first``, then e.g. every 8th, every 4th, and so on."""
    rest = sorted(set(steps))
    order = [step for step in [*rest[-1:], *rest[:1], *first] if step in rest]
    order += [step for power in range(len(rest).bit_length(), -1, -1) for step in rest[:: 2**power]]
    yield from dict.fromkeys(order)
