"""A report: one HTML file that holds its data, scripts and styles, and loads nothing.

Texts that models wrote are stored as JSON with escaped `<`, or packed (zlib, base64). Only scripts with a known hash
run, so nothing in the data can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...extensions.recording.event_log import prompt_beginning
from .payload import of_step, overview, spread_out
from .recorded_run import RecordedRun

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "uplot/uPlot.iife.min.js", "base.js", "data.js", "charts.js", "overview.js", "time.js", "tokens.js",
    "completions.js", "groups.js", "advisor.js", "settings.js", "main.js",
)  # fmt: skip
STYLES = ("uplot/uPlot.min.css", "page.css")
NAME = "report.html"  # the model card links this file
# Packed bytes of all runs of a page together; base64 makes 4 bytes of 3.
ROLLOUT_BYTES = 900_000
COMPLETION_BYTES = 3_000_000
MOST_TEXTS = 2000  # prompts with their beginnings in the page from the start
STEP_BYTES = 2_000_000  # approximate bytes of a step's completions as JSON; packed a sixth to a tenth


def write_report(run_dir: str | Path, *others: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, or of several side by side. Return the file's path. It is either complete or absent.

    Args:
        run_dir: a run's output_dir; the run may go on, or only have a trainer_state.json.
        out: the file; default ``report.html`` in ``run_dir``.
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
            f"{folder} holds nothing to report: no _report/events.jsonl, no trainer_state.json (its own or a "
            "checkpoint's) and no completions. Give a run's output_dir, of a run that was trained with report: true."
        )
    return run


def page(runs: Sequence[RecordedRun]) -> str:
    """Make the page of runs as they were last read."""
    data, blocks = [], []
    for place, run in enumerate(runs):
        found = overview(run)
        steps, chosen, texts = _packed_steps(run, len(runs))
        found["texts"] = texts | found.get("texts", {})
        recorded = sum(has for _, has in found["held"])
        found["held"] = [[step, chosen[step]] for step in sorted(chosen)]
        found["chosen"] = [sum(chosen.values()), recorded]  # steps with completions in the page, and recorded ones
        data.append(found)
        blocks += [f'<script type="text/plain" id="step-{place}-{step}">{block}</script>' for step, block in steps]
    return document({"live": False, "version": __version__, "runs": data}, "\n".join(blocks))


def _packed_steps(run: RecordedRun, runs: int) -> tuple[list[tuple[int, str]], dict[int, int], dict[str, str]]:
    """Pack as many steps as fit. Return them, whether (1) each has completions, and the prompts' beginnings."""
    texts: dict[str, str] = {}
    alarms = [int(alarm["step"]) for alarm in run.alarms[:20]]
    order = list(spread_out({*run.samples.steps, *run.rollouts, *run.groups}, alarms))
    chosen: dict[int, bytes] = {}
    room = COMPLETION_BYTES // runs
    for step in filter({*run.samples.steps}.__contains__, order):
        if room <= 0:
            break
        content = of_step(run, step, min(STEP_BYTES, 8 * room))
        chosen[step] = zlib.compress(compact(content).encode(), 9)
        room -= len(chosen[step])
        for completion in content["completions"]:
            if completion.get("key") and len(texts) < MOST_TEXTS:
                texts.setdefault(completion["key"], prompt_beginning(content["prompts"][completion["prompt"]]))
    with_completions, room = {*chosen}, ROLLOUT_BYTES // runs
    for step in order:
        if room > 0 and step not in chosen:
            chosen[step] = zlib.compress(compact(of_step(run, step, 0)).encode(), 9)
            room -= len(chosen[step])
    packed = [(step, base64.b64encode(chosen[step]).decode()) for step in sorted(chosen)]
    return packed, {step: int(step in with_completions) for step in chosen}, texts


def compact(value: Any) -> str:
    """Write JSON without blanks. NaN is an error."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def document(data: dict[str, Any], blocks: str = "", connect: str = "'none'") -> str:
    """Write the page around its data (``runs``, ``live``, ``version``) and elements with packed steps; it may load the
    addresses of ``connect``."""
    # Character data only: none of these scripts may contain the end of an element.
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, style)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    escaped = compact(data)  # for a script element; the last two are line ends that only JavaScript knows
    for character in "<>&\u2028\u2029":
        escaped = escaped.replace(character, f"\\u{ord(character):04x}")
    parts = {"POLICY": policy, "STYLE": style, "DATA": escaped, "BLOCKS": blocks, "SCRIPT": script}
    parts["VERSION"] = __version__
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)  # one pass, so no part is searched
