"""The table that shows completions in a terminal."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
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

DEFAULT_WIDTH = 120  # characters
STDERR = 2
TEXT_LINES = 6  # target number of lines of a cell of text
EXTRA_CHARACTERS = 60  # characters of a logged value
# A model's text must not steer the terminal: control characters except newline and tab are replaced.
_CONTROLS = {code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def completions_table(
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    title: str,
    limit: int | None,
    unique_prompts: bool,
    width: int = DEFAULT_WIDTH,
) -> Table:
    """Build a table of completions with their rewards and advantages, and their steps if these differ.

    Args:
        limit: rows at most, one of each group before the second of any; None is all.
        unique_prompts: show one completion per group.
        width: characters. Long texts are shortened in the middle to fit.
    """
    extra, several = extra_names(rows), len({row.step for row in rows}) > 1
    # A column of numbers takes its header and a border; the text columns share the rest 1 : 2.
    room = max(width - (48 if several else 40) - sum(max(len(name), 5) + 3 for name in [*reward_names, *extra]), 45)
    prompt_limit, completion_limit = TEXT_LINES * room // 3, TEXT_LINES * room * 2 // 3
    table = Table(title=title, width=width, show_lines=True)
    if several:
        table.add_column("Step", justify="right", no_wrap=True)
    table.add_column("Prompt", ratio=1, overflow="fold")
    table.add_column("Completion", ratio=2, overflow="fold")
    for name in [*reward_names, *extra]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name in ("Advantage", "Tokens", "End"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in chosen_rows(rows, limit, unique_prompts):
        table.add_row(
            *([str(row.step)] if several else []),
            Text(_shorten(prompt_text(row.prompt, row.sizes), prompt_limit)),
            Text(_shorten(row.completion, completion_limit)),
            *(_number_text(value) for value in row.rewards),
            *(_extra_cell(row.extra.get(name)) for name in extra),
            _number_text(row.advantage),
            str(row.completion_tokens),
            Text(_shorten(row.finish_reason, EXTRA_CHARACTERS)),
        )
    return table


def print_table(
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    title: str,
    limit: int | None,
    unique_prompts: bool,
    width: int | None = None,
) -> None:
    """Write `completions_table` to standard output; ``width`` defaults to the terminal's."""
    terminal = sys.stdout.isatty()
    width = width or terminal_width()
    table = completions_table(rows, reward_names, title, limit, unique_prompts, width)
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=terminal).print(table)
    sys.stdout.write(printable(buffer.getvalue()))
    sys.stdout.flush()


def terminal_width() -> int:
    """Return the width in characters of the terminal of standard output, or of standard error if output is piped into a
    pager; 120 for a log."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size((DEFAULT_WIDTH, 0)).columns
    with contextlib.suppress(OSError):
        return os.get_terminal_size(STDERR).columns or DEFAULT_WIDTH
    return DEFAULT_WIDTH


def chosen_rows(rows: Sequence[CompletionRow], limit: int | None, unique_prompts: bool) -> list[CompletionRow]:
    """Choose the rows to show, by group: at most ``limit``, the first of each group before the second of any."""
    turns: dict[int, Iterator[int]] = defaultdict(itertools.count)  # counters of each group
    by_turn = sorted((next(turns[row.position]), index) for index, row in enumerate(rows))
    chosen = [index for turn, index in by_turn if not (unique_prompts and turn)][:limit]
    return [rows[index] for index in sorted(chosen)]


def prompt_text(prompt: Any, sizes: Sequence[str] = ()) -> str:
    """Return the text of a prompt, or of its last user message, with a mark such as "[image 32x32]" for each image."""
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [message for message in prompt if isinstance(message, dict)] or [{}]
    users = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    marks = iter([f"[image {size}]" for size in sizes])
    before = ""
    if len(users) == 1 and not any(_is_image(part) for message in messages for part in _parts(message)):
        before = "".join(marks)  # TRL puts the images before the first user message then
    texts = [_content_text(message, marks) for message in messages]
    return before + texts[users[-1] if users else -1]


def _content_text(message: dict[str, Any], marks: Iterator[str]) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(next(marks, "[image]") if _is_image(part) else _part_text(part) for part in content)


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return str(part if text is None else text)


def _shorten(text: str, limit: int) -> str:
    """Shorten a text to at most ``limit`` characters (at least 3): start, ellipsis, end."""
    text = text.translate(_CONTROLS)
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - max(limit - head - 3, 0) :]}"


def _extra_cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text(_number_text(value))
    return Text("–" if value is None else _shorten(str(value), EXTRA_CHARACTERS))


def _number_text(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
