"""Files of logged completions, in TRL's format with more columns, and a printed table. This module imports no torch."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import itertools
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...usercode.untrusted import clean, printable
from .event_log import prompt_text

FOLDER = "completions"
TEXT = "completion"
FIXED = (
    "step", "position", "prompt", TEXT, "prompt_tokens", "completion_tokens", "finish_reason", "advantage",
)  # fmt: skip
IMAGES = "image"  # column of thumbnails, as a list of `datasets.Image`
SIZES = "image_size"
NAMES_KEY = b"colograd.reward_names"
EXTRA_KEY = b"colograd.extra_names"
IMAGES_KEY = b"colograd.images"
IMAGE_TYPE = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
# File metadata that tell `datasets` and the Hub's viewer that column `IMAGES` has images.
IMAGE_FEATURE = {"info": {"features": {IMAGES: {"feature": {"_type": "Image"}, "_type": "Sequence"}}}}
ROWS = 256  # Rows per write to a file, and per read.
PACKING = 4096  # In memory, a file's rows may take this many times the file's size, plus 64 MiB.
ROW_OBJECT_BYTES = 2048
HEADER_LIST = 100_000
DEFAULT_WIDTH = 120
TEXT_LINES = 6
EXTRA_CHARACTERS = 60
# Control characters to replace: a model's text must not control the terminal.
_CONTROLS = {code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
# Errors that reading a damaged file may raise, besides Arrow's.
NONSENSE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def data_url(file: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(file).decode()


@dataclass(frozen=True, slots=True)
class CompletionRow:
    step: int  # Optimizer step that the completion was sampled for, or the last step before its evaluation.
    position: int  # Position of the completion's prompt in the stream of prompts.
    prompt: Any
    text: bytes  # UTF-8, because one rare character makes a Python string four times as large.
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    rewards: tuple[float, ...]  # One reward per function. NaN: the function abstained.
    advantage: float  # If each token has its own advantage, their mean. NaN in an evaluation.
    extra: dict[str, Any] = field(default_factory=dict)
    thumbnails: tuple[bytes, ...] = ()  # JPEG files of the prompt's first images.
    sizes: tuple[str, ...] = ()  # Sizes of all images of the prompt, such as "640x480".

    @property
    def completion(self) -> str:
        return self.text.decode()


def extra_names(rows: Sequence[CompletionRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.extra))


def column_names(
    reward_names: Sequence[str], extra: Sequence[str], images: bool = False
) -> tuple[list[str], list[str]]:
    """Return the column names of rewards, and of extra values that rewards logged. Duplicate names get a prefix."""
    taken = (*FIXED, IMAGES, SIZES) if images else FIXED
    rewards = [f"rewards/{name}" if name in taken else name for name in reward_names]
    return rewards, [f"extra/{name}" if name in (*taken, *rewards) else name for name in extra]


def columns(rows: Sequence[CompletionRow], reward_names: Sequence[str], images: bool = False) -> dict[str, list[Any]]:
    """Return a dict from column names to values, one per row, without thumbnails. Completions are UTF-8 bytes."""
    found = {name: [row.text if name == TEXT else getattr(row, name) for row in rows] for name in FIXED}
    found["prompt"] = _storable(found["prompt"], functools.partial(json.dumps, default=str))
    if images:
        found[SIZES] = [list(row.sizes) for row in rows]
    extra = extra_names(rows)
    of_rewards, of_extra = column_names(reward_names, extra, images)
    found |= {column: [row.rewards[index] for row in rows] for index, column in enumerate(of_rewards)}
    of_each = zip(extra, of_extra, strict=True)
    return found | {column: _storable([row.extra.get(name) for row in rows]) for name, column in of_each}


def _storable(values: list[Any], text: Callable[[Any], str] = str) -> list[Any]:
    """Return the values, or each value's text if one Parquet column can't hold all values."""
    try:
        values = [clean(value) for value in values]
        pq.write_table(pa.table({"values": values}), pa.BufferOutputStream())
    except Exception:  # values of unknown types raise many kinds of errors
        return [None if value is None else clean(text(value)) for value in values]
    return values


def write_log(
    run_dir: str | Path,
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    step: int,
    kind: str = "completions",
    images: bool = False,
) -> Path:
    data: dict[str, Any] = columns(rows, reward_names, images)
    data[TEXT] = pa.array(data[TEXT], pa.string())
    named: dict[bytes, Any] = {NAMES_KEY: list(reward_names), EXTRA_KEY: extra_names(rows)}
    if images:
        data[SIZES] = pa.array(data[SIZES], pa.list_(pa.string()))
        named |= {IMAGES_KEY: [IMAGES, SIZES], b"huggingface": IMAGE_FEATURE}
    table = pa.table(data, metadata={key: json.dumps(names).encode() for key, names in named.items()})
    folder = Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{step:05d}.parquet"
    aside = path.with_suffix(".partial")
    schema = table.schema.append(pa.field(IMAGES, IMAGE_TYPE)) if images else table.schema
    try:
        with pq.ParquetWriter(aside, schema, write_page_checksum=True) as file:
            for first in range(0, max(len(rows), 1), ROWS):  # Arrow repeats equal thumbnails, so few rows at a time
                part = table.slice(first, ROWS)
                if images:
                    chosen = rows[first : first + ROWS]
                    small = [[{"bytes": each, "path": None} for each in row.thumbnails] for row in chosen]
                    part = part.append_column(schema.field(IMAGES), pa.array(small, IMAGE_TYPE))
                file.write_table(part)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return path


class CompletionFile:
    """Reader of Colograd's or TRL's completion files. The file's ``size`` in bytes limits the memory for rows."""

    def __init__(self, source: Path | BinaryIO, size: int) -> None:
        self._file = pq.ParquetFile(source, thrift_container_size_limit=HEADER_LIST, page_checksum_verification=True)
        metadata = self._file.schema_arrow.metadata or {}
        self.reward_names, self._extra_names = (_names(metadata.get(key, b"[]")) for key in (NAMES_KEY, EXTRA_KEY))
        self.has_images = IMAGES_KEY in metadata
        self._columns = column_names(self.reward_names, self._extra_names, self.has_images)
        self._most_bytes = min(PACKING * size + 2**26, psutil.virtual_memory().available // 2)

    def rows(self, pictures: bool) -> Iterator[tuple[dict[str, Any], list[Any], dict[str, Any]]]:
        """Yield for each row: a dict by column, its list of rewards, and a dict of extra values that rewards logged."""
        groups = (self._file.metadata.row_group(index) for index in range(self._file.metadata.num_row_groups))
        taken, schema = 0, self._file.schema_arrow
        if sum(group.total_byte_size for group in groups) > self._most_bytes:
            raise ValueError("the header claims more bytes of rows than the file's size or the free memory allow")
        if "dictionary<" in str(schema.types):  # A few bytes of a dictionary type can unpack to any size.
            raise TypeError("a column has a dictionary type, which no completions log has")
        read = [name for name in schema.names if name != IMAGES] if self.has_images and not pictures else None
        for batch in self._file.iter_batches(batch_size=ROWS, columns=read, use_threads=False):
            taken += batch.nbytes + ROW_OBJECT_BYTES * batch.num_rows
            if taken > self._most_bytes:
                raise ValueError(f"the file's rows take more than {self._most_bytes:,} bytes")
            for row in batch.to_pylist():
                extra = {name: row[column] for name, column in zip(self._extra_names, self._columns[1], strict=True)}
                yield row, [row[column] for column in self._columns[0]], extra


def _names(json_list: bytes) -> list[str]:
    names = json.loads(json_list)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{json_list[:50]!r} isn't a list of column names")
    return names


def read_log(path: Path) -> tuple[list[CompletionRow], list[str]]:
    try:
        file = CompletionFile(path, path.stat().st_size)
        numbers = ("step", "position", "prompt_tokens", "completion_tokens")
        rows = [
            CompletionRow(
                **dict[str, Any]((name, int(row[name])) for name in numbers),
                prompt=prompt_of(row["prompt"]),
                text=row[TEXT].encode(),
                finish_reason=str(row["finish_reason"]),
                advantage=float(row["advantage"]),
                rewards=tuple(math.nan if value is None else float(value) for value in rewards),
                extra=extra,
                sizes=tuple(map(str, row[SIZES] or ())) if file.has_images else (),
            )
            for row, rewards, extra in file.rows(pictures=False)
        ]
        return rows, file.reward_names
    except (pa.ArrowException, *NONSENSE) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} can't be read ({type(error).__name__}: {reason}): the file is damaged, or isn't a completions "
            "log. Show another step, or restore the file from a copy."
        ) from None


def prompt_of(logged: Any) -> Any:
    """Convert a logged prompt to the dataset's form: text or messages."""
    if isinstance(logged, str) and logged.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(logged)
            if found and isinstance(found, list) and all(isinstance(message, dict) for message in found):
                return found
    return logged


def logged_steps(run_dir: Path) -> dict[int, Path]:
    paths = {path.stem.removeprefix("completions_"): path for path in (run_dir / FOLDER).glob("completions_*.parquet")}
    return dict(sorted((int(number), path) for number, path in paths.items() if number.isdigit()))


def completions_table(
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    title: str,
    limit: int | None,
    unique_prompts: bool,
    width: int = DEFAULT_WIDTH,
) -> Table:
    extra, several = extra_names(rows), len({row.step for row in rows}) > 1
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
    """Print rows as a table. Default ``width``: the terminal's, even with a pager. No terminal: `DEFAULT_WIDTH`."""
    terminal, buffer = sys.stdout.isatty(), io.StringIO()
    width = width or (Console().width if terminal or sys.stderr.isatty() else DEFAULT_WIDTH)
    table = completions_table(rows, reward_names, title, limit, unique_prompts, width)
    Console(file=buffer, width=width, force_terminal=terminal).print(table)
    print(printable(buffer.getvalue()), end="", flush=True)


def chosen_rows(rows: Sequence[CompletionRow], limit: int | None, unique_prompts: bool) -> list[CompletionRow]:
    """Choose at most ``limit`` rows: one per prompt, then a second one per prompt, and so on.

    ``unique_prompts``: only one per prompt. The chosen rows keep their order."""
    counters: dict[int, Iterator[int]] = defaultdict(itertools.count)
    by_turn = sorted((next(counters[row.position]), index) for index, row in enumerate(rows))
    chosen = [index for turn, index in by_turn if not (unique_prompts and turn)][:limit]
    return [rows[index] for index in sorted(chosen)]


def _shorten(text: str, limit: int) -> str:
    text = text.translate(_CONTROLS)
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - max(limit - head - 3, 0) :]}"


def _cell(value: Any) -> Text:
    if value is None or value != value:
        return Text("–")
    return Text(f"{value:.2f}" if isinstance(value, float) else _shorten(str(value), EXTRA_CHARACTERS))
