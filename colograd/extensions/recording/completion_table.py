"""The printed table of completions, with their rewards."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...usercode.untrusted import printable
from .completions import CompletionRow, extra_names
from .event_log import prompt_text

DEFAULT_WIDTH = 120  # width of the table in characters if no terminal's width is known
STDERR = 2
TEXT_LINES = 6  # Target number of lines in a cell of text.
EXTRA_CHARACTERS = 60  # Maximum characters of a logged value.
# Control characters except newline and tab are replaced, because a model's text must not control the terminal.
_CONTROLS = {code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def completions_table(
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    title: str,
    limit: int | None,
    unique_prompts: bool,
    width: int = DEFAULT_WIDTH,
) -> Table:
    """Return a table of completions with rewards, advantages, and steps if the steps differ. Long texts are shortened.

    Args:
        limit: maximum number of rows, chosen as by `chosen_rows`. None shows all.
        unique_prompts: whether to show only one completion per group.
    """
    extra, several = extra_names(rows), len({row.step for row in rows}) > 1
    # A column of numbers is as wide as its header and border. Prompt and completion share the remaining width 1 : 2.
    room = max(width - (48 if several else 40) - sum(max(len(name), 5) + 3 for name in [*reward_names, *extra]), 45)
    prompt_limit, completion_limit = TEXT_LINES * room // 3, TEXT_LINES * room * 2 // 3
    table, number = Table(title=title, width=width, show_lines=True), {"justify": "right", "no_wrap": True}
    if several:
        table.add_column("Step", **number)  # type: ignore[arg-type]
    table.add_column("Prompt", ratio=1, overflow="fold")
    table.add_column("Completion", ratio=2, overflow="fold")
    for name in [*reward_names, *extra]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name in ("Advantage", "Tokens", "End"):
        table.add_column(name, **number)  # type: ignore[arg-type]
    for row in chosen_rows(rows, limit, unique_prompts):
        prompt = _shorten(prompt_text(row.prompt, row.sizes), prompt_limit)
        texts = Text(prompt), Text(_shorten(row.completion, completion_limit))
        values = [*row.rewards, *(row.extra.get(name) for name in extra), row.advantage, row.completion_tokens]
        table.add_row(*([str(row.step)] if several else []), *texts, *map(_cell, [*values, row.finish_reason]))
    return table


def print_table(
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    title: str,
    limit: int | None,
    unique_prompts: bool,
    width: int | None = None,
) -> None:
    """Print `completions_table`. ``width`` defaults to the width of standard output's or standard error's terminal."""
    terminal, buffer = sys.stdout.isatty(), io.StringIO()
    if not width and terminal:
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 0)).columns
    elif not width:  # Standard output may be a pipe to a pager in standard error's terminal.
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(STDERR).columns
    width = width or DEFAULT_WIDTH
    table = completions_table(rows, reward_names, title, limit, unique_prompts, width)
    Console(file=buffer, width=width, force_terminal=terminal).print(table)
    print(printable(buffer.getvalue()), end="", flush=True)


def chosen_rows(rows: Sequence[CompletionRow], limit: int | None, unique_prompts: bool) -> list[CompletionRow]:
    """Return at most ``limit`` rows in their order. First completions of groups are chosen before second ones."""
    turns: dict[int, Iterator[int]] = defaultdict(itertools.count)  # number of completions of each group so far
    by_turn = sorted((next(turns[row.position]), index) for index, row in enumerate(rows))
    chosen = [index for turn, index in by_turn if not (unique_prompts and turn)][:limit]
    return [rows[index] for index in sorted(chosen)]


def _shorten(text: str, limit: int) -> str:
    """Shorten a text to ``limit`` characters (at least 7): its start, an ellipsis and its end."""
    text = text.translate(_CONTROLS)
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - max(limit - head - 3, 0) :]}"


def _cell(value: Any) -> Text:
    if value is None or value != value:
        return Text("–")
    return Text(f"{value:.2f}" if isinstance(value, float) else _shorten(str(value), EXTRA_CHARACTERS))
