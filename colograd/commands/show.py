"""``colograd show RUN --step N``: a step's completions, from the log that a run with ``log_completions`` wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..reporting.completion_log import logged_steps, read_log
from ..reporting.completion_table import print_table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="colograd show", description="Completions of one step of a run, as a table.")
    parser.add_argument("run", type=Path, help="a run's output_dir")
    parser.add_argument("--step", type=int, help="optimizer step, from 1; default: the last one logged")
    parser.add_argument("--limit", type=int, help="rows at most, one of each prompt before the second of any")
    parser.add_argument("--unique-prompts", action="store_true", help="one completion per prompt")
    parser.add_argument("--best", action="store_true", help="highest advantages first")
    options = parser.parse_args(argv)
    steps = logged_steps(options.run)
    if not steps:
        print(
            f"colograd show: {options.run} holds no completions: train with log_completions: true, and give the run's "
            "output_dir.",
            file=sys.stderr,
        )
        return 2
    step = max(steps) if options.step is None else options.step
    if step not in steps:
        print(
            f"colograd show: step {step} isn't in the log of {options.run}, which has {_ranges(steps)}.",
            file=sys.stderr,
        )
        return 2
    try:
        rows, names = read_log(steps[step])
    except ValueError as error:
        print(f"colograd show: {error}", file=sys.stderr)
        return 2
    if options.best:
        rows.sort(key=lambda row: -row.advantage)
    print_table(rows, names, f"Step {step}", options.limit, options.unique_prompts)
    return 0


def _ranges(steps: Iterable[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
