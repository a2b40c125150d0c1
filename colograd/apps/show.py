"""``colograd show RUN`` prints a step's completions, or all completions that contain a text."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..extensions.recording.completions import CompletionRow, logged_steps, print_table, read_log
from ..extensions.recording.event_log import prompt_text
from .report.samples import Samples

MOST_BYTES = 2**28  # Maximum bytes of completions to take from a step. Groups beyond it are left out.


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="colograd show", description="Completions of a run, as a table.")
    add = parser.add_argument
    add("run", type=Path, help="a run's output_dir")
    add("--step", type=int, help="optimizer step, from 1; default: the last, of --grep and --group all")
    add("--group", type=int, help="one prompt's completions, by its place in the stream of prompts")
    add("--grep", type=_pattern, help="a regular expression that prompt or completion contains")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest advantages first")
    order.add_argument("--worst", action="store_true", help="lowest advantages first")
    add("--limit", type=int, default=16, help="rows at most, one of each prompt before the second of any; 0: all")
    add("--unique-prompts", action="store_true", help="one completion per prompt")
    add("--width", type=int, help="characters; default: the terminal's, also in a pager")
    options = parser.parse_args(argv)
    if not options.run.is_dir():
        raise ValueError(f"{options.run} is no folder: give the output_dir of a run.")
    logged, samples = logged_steps(options.run), Samples(options.run)
    samples.refresh()
    steps = sorted({*logged, *samples.stored})
    if not steps:
        raise ValueError(f"{options.run} holds no completions: train with `log_completions: true`.")
    if options.step not in (None, *steps):
        raise ValueError(f"step {options.step} isn't in the log of {options.run}: choose one of {_ranges(steps)}.")
    if options.step is not None:
        steps = [options.step]
    elif options.grep is None and options.group is None:
        steps = steps[-1:]
    found: list[tuple[CompletionRow, dict[str, float]]] = []
    total, groups = 0, set[int]()
    for step in steps:
        rows, names = read_log(logged[step]) if step in logged else stored_rows(samples, step)
        total, groups = total + len(rows), groups | {row.position for row in rows}
        for row in rows:
            texts = (row.completion, prompt_text(row.prompt)) if options.grep else ()
            if options.group in (None, row.position) and (not options.grep or any(map(options.grep.search, texts))):
                found.append((row, dict(zip(names, row.rewards, strict=True))))
    which = f"step{'s' * (len(steps) > 1)} {_ranges(steps)}"
    if not found:
        raise ValueError(
            f"none of the {total} completions of {which} passes the filters --group and --grep: choose another --step, "
            f"--grep or --group (one of {_ranges(sorted(groups))})."
        )
    names = list(dict.fromkeys(name for _, rewards in found for name in rewards))
    rows = [replace(row, rewards=tuple(rewards.get(name, math.nan) for name in names)) for row, rewards in found]
    if options.worst or options.best:
        rows.sort(key=lambda row: row.advantage, reverse=options.best)
    limit = min(options.limit or len(rows), len(rows))
    shown = f", {limit} of {total} completions" if limit < total else ""
    print_table(rows, names, f"{which.capitalize()}{shown}", limit, options.unique_prompts, options.width)
    return 0


def stored_rows(samples: Samples, step: int) -> tuple[list[CompletionRow], list[str]]:
    """Read a training step's completions that were recorded token by token, and the names of its reward functions."""
    found = [entry for entry in samples.of_step(step, MOST_BYTES)[0] if entry["purpose"] == "train"]
    names = list(dict.fromkeys(name for entry in found for name in entry["rewards"]))
    rows = []
    for entry in found:
        numbers = [entry["advantage"], *map(entry["rewards"].get, names)]
        advantage, *rewards = (math.nan if value is None else value for value in numbers)
        rows.append(CompletionRow(
            step=step, position=entry["position"], prompt=entry["prompt"], text="".join(entry["tokens"]).encode(),
            prompt_tokens=0,  # The table doesn't show this number.
            completion_tokens=entry["length"], finish_reason=entry["finish"], rewards=tuple(rewards),
            advantage=advantage, extra=entry["extra"],
        ))  # fmt: skip
    return rows, names


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from None


def _ranges(steps: Iterable[int]) -> str:
    """Format [1, 2, 3, 7] as "1-3, 7"."""
    runs = itertools.groupby(enumerate(steps), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in ([*pairs] for _, pairs in runs)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
