"""Completions as rows, and the table that shows them."""

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .thumbnails import thumbnails

if TYPE_CHECKING:  # `colograd show` does without torch, whose import takes longer than the table
    from ..batch import ScoredGroup

DEFAULT_WIDTH = 120  # characters
STDERR = 2
TEXT_LINES = 6  # lines a cell of text is meant to have
EXTRA_CHARACTERS = 60  # of a logged value
# What a model writes is shown, never obeyed: control characters (but newline and tab) would steer the terminal.
_CONTROLS = {code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One completion, as it is logged."""

    step: int  # the optimizer step that trains on it, from 1
    position: int  # the prompt's place in the stream of prompts: one per group
    prompt: Any  # text, or messages
    text: bytes  # the completion's, as UTF-8: one rare character makes a Python string four times as large
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    rewards: tuple[float, ...]  # [R], NaN where a function abstained
    advantage: float  # the mean over its tokens where there is one per token
    extra: dict[str, Any] = field(default_factory=dict)  # what reward functions logged of it, by column
    thumbnails: tuple[bytes, ...] = ()  # JPEG files of the prompt's first images, which its completions share
    sizes: tuple[str, ...] = ()  # of all of its images, as in "640x480"

    @property
    def completion(self) -> str:
        return self.text.decode()


def as_utf8(texts: Sequence[str]) -> list[bytes]:
    """Texts as rows hold them."""
    return [text.encode(errors="replace") for text in texts]


def completion_rows(
    groups: Sequence[ScoredGroup], texts: Sequence[Sequence[bytes]], step: int, images: bool = True
) -> list[CompletionRow]:
    """The rows of a step's groups; ``texts[g][i]`` is the decoded completion i of group g, as UTF-8.

    images: whether prompts' images are logged.
    """
    rows = []
    small: dict[str, tuple[bytes, ...]] = {}  # by digest: equal images of several prompts are one object, too
    for scored, of_group in zip(groups, texts, strict=True):
        group, advantages = scored.group, _mean_advantages(scored)
        prompt = group.example.get("prompt", "")
        if any(rollout.input.images is not None for rollout in group.rollouts):
            from ..data.images import text_of

            prompt = text_of(prompt)
        for i, (rollout, text) in enumerate(zip(group.rollouts, of_group, strict=True)):
            # An environment may have begun each completion with other pictures.
            seen = rollout.input.images if images else None
            if seen is not None and seen.digest not in small:
                small[seen.digest] = tuple(thumbnails(seen.pictures))
            rows.append(
                CompletionRow(
                    step=step,
                    position=group.position,
                    prompt=prompt,
                    text=text,
                    prompt_tokens=len(rollout.prompt_ids),
                    completion_tokens=len(rollout.completion_ids),
                    finish_reason=rollout.finish_reason.value,
                    rewards=tuple(scored.rewards[i].tolist()),
                    advantage=advantages[i],
                    extra={name: values[i] for name, values in scored.logged.columns.items()},
                    thumbnails=() if seen is None else small[seen.digest],
                    sizes=() if seen is None else tuple("{}x{}".format(*each.size) for each in seen.pictures),
                )
            )
    return rows


def completions_table(
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    title: str,
    limit: int | None,
    unique_prompts: bool,
    width: int = DEFAULT_WIDTH,
) -> Table:
    """A table of completions with their rewards and advantages.

    Args:
        rows: the step's completions, group by group.
        reward_names: [R], in the order of ``CompletionRow.rewards``.
        title: whose completions they are.
        limit: rows at most, one of each group before the second of any; None is all.
        unique_prompts: show one completion per group only.
        width: characters. Long texts are shortened in the middle to fit.
    """
    extra = extra_names(rows)
    # A column of numbers takes its header and a border; the text columns share the rest 1 : 2.
    room = max(width - 40 - sum(max(len(name), 5) + 3 for name in [*reward_names, *extra]), 45)
    prompt_limit, completion_limit = TEXT_LINES * room // 3, TEXT_LINES * room * 2 // 3
    table = Table(title=title, width=width, show_lines=True)
    table.add_column("Prompt", ratio=1, overflow="fold")
    table.add_column("Completion", ratio=2, overflow="fold")
    for name in [*reward_names, *extra]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name in ("Advantage", "Tokens", "End"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in chosen_rows(rows, limit, unique_prompts):
        table.add_row(
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
    """Write `completions_table` to standard output, as wide as the terminal, also through a pager; 120 characters
    where there is none."""
    terminal = sys.stdout.isatty()
    width = width or terminal_width()
    table = completions_table(rows, reward_names, title, limit, unique_prompts, width)
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=terminal).print(table)
    # A log that can't encode a character must not end the run.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(buffer.getvalue().encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def terminal_width() -> int:
    """In characters, of what the output, or else the errors beside a pipe to a pager, are shown on; of a log 120."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size((DEFAULT_WIDTH, 0)).columns
    with contextlib.suppress(OSError):
        return os.get_terminal_size(STDERR).columns or DEFAULT_WIDTH
    return DEFAULT_WIDTH


def chosen_rows(rows: Sequence[CompletionRow], limit: int | None, unique_prompts: bool) -> list[CompletionRow]:
    """The rows to show, by group; those chosen first are the first of each group."""
    turns: dict[int, Iterator[int]] = defaultdict(itertools.count)  # of each group
    by_turn = sorted((next(turns[row.position]), index) for index, row in enumerate(rows))
    chosen = [index for turn, index in by_turn if not (unique_prompts and turn)][:limit]
    return [rows[index] for index in sorted(chosen)]


def prompt_text(prompt: Any, sizes: Sequence[str] = ()) -> str:
    """The prompt's text; of a conversation the last user message (or the last one, where no user speaks).

    sizes: of its images, in whose places a mark such as "[image 32x32]" stands.
    """
    if not isinstance(prompt, list):
        return str(prompt)
    said = [message for message in prompt if isinstance(message, dict)] or [{}]
    users = [place for place, message in enumerate(said) if message.get("role") == "user"]
    marks = iter([f"[image {size}]" for size in sizes])
    before = ""
    if len(users) == 1 and not any(_is_image(part) for message in said for part in _parts(message)):
        before = "".join(marks)  # where the images are put then: before the first user message
    texts = [_content_text(message, marks) for message in said]
    return before + texts[users[-1] if users else -1]


def _content_text(message: dict[str, Any], marks: Iterator[str]) -> str:
    """A message's content, with the next of the marks in each place of an image."""
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
    """At most ``limit`` characters (at least 3): start, ellipsis, end."""
    text = text.translate(_CONTROLS)
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - max(limit - head - 3, 0) :]}"


def _mean_advantages(scored: ScoredGroup) -> list[float]:
    """The completions' advantages; where there is one per token, their means."""
    lengths = [len(rollout.completion_ids) for rollout in scored.group.rollouts]
    if len(scored.advantages) == len(lengths):
        return scored.advantages.tolist()
    return [float(part.mean()) for part in scored.advantages.split(lengths)]


def extra_names(rows: Sequence[CompletionRow]) -> list[str]:
    """The columns that reward functions logged for any of the rows."""
    return list(dict.fromkeys(name for row in rows for name in row.extra))


def _extra_cell(value: Any) -> Text:
    """A logged value as a cell: a number as rewards are shown, else its text."""
    if isinstance(value, float):
        return Text(_number_text(value))
    return Text("–" if value is None else _shorten(str(value), EXTRA_CHARACTERS))


def _number_text(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
