"""Files of completions: one parquet file per optimizer step and per evaluation, written and read without torch.

The files have TRL's names (``completions/completions_00001.parquet``, ``eval_00001.parquet``), TRL's columns, and more:
the prompt's position in the stream, token counts, how each completion ended, values of ``log_extra``, small pictures of
prompts' images. Each row has its prompt's pictures; parquet's dictionaries store equal ones of ROWS rows once.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ...usercode.untrusted import clean

FOLDER = "completions"
TEXT = "completion"  # the column of `CompletionRow.text`
FIXED = (
    "step", "position", "prompt", TEXT, "prompt_tokens", "completion_tokens", "finish_reason", "advantage",
)  # fmt: skip
IMAGES = "image"  # small pictures of a prompt's first images, as `datasets` stores images (TRL's name)
SIZES = "image_size"  # sizes of all images of a prompt, as in "640x480"
# Entries of the file's metadata:
NAMES_KEY = b"colograd.reward_names"  # the columns that are rewards, in order
EXTRA_KEY = b"colograd.extra_names"  # the columns that reward functions logged
IMAGES_KEY = b"colograd.images"  # present if the file has the columns of images
IMAGE_TYPE = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))  # `datasets.Image`, several per row
# `datasets`, and the viewer on the Hub, show the column as images.
IMAGE_FEATURE = {"info": {"features": {IMAGES: {"feature": {"_type": "Image"}, "_type": "Sequence"}}}}
ROWS = 256  # rows that are packed and written together
PACKING = 4096  # largest ratio of unpacked rows to their file's size
ROW_BYTES = 2048  # bytes of Python objects per row
LARGEST_LIST = 100_000  # entries in a parquet file's description of itself
# Errors that reading a file other than a completions log may raise, in addition to Arrow's own.
NONSENSE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def data_url(file: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(file).decode()


@dataclass(frozen=True, slots=True)
class CompletionRow:
    step: int  # the optimizer step that trains on the completion, from 1
    position: int  # the prompt's position in the stream of prompts: one per group
    prompt: Any  # text, or messages
    text: bytes  # UTF-8: one rare character makes a Python string four times as large
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    rewards: tuple[float, ...]  # [R], NaN where a function abstained
    advantage: float  # the mean over its tokens if each token has one
    extra: dict[str, Any] = field(default_factory=dict)  # logged by reward functions, by column
    thumbnails: tuple[bytes, ...] = ()  # JPEG files of the prompt's first images, which its completions share
    sizes: tuple[str, ...] = ()  # sizes of all the prompt's images, as in "640x480"

    @property
    def completion(self) -> str:
        return self.text.decode()


def extra_names(rows: Sequence[CompletionRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.extra))


def column_names(
    reward_names: Sequence[str], extra: Sequence[str], images: bool = False
) -> tuple[list[str], list[str]]:
    """Name the columns of rewards and of logged values, with a prefix if an earlier column has the name."""
    taken = (*FIXED, IMAGES, SIZES) if images else FIXED
    rewards = [f"rewards/{name}" if name in taken else name for name in reward_names]
    return rewards, [f"extra/{name}" if name in (*taken, *rewards) else name for name in extra]


def columns(rows: Sequence[CompletionRow], reward_names: Sequence[str], images: bool = False) -> dict[str, list[Any]]:
    """Convert rows into columns, without the small pictures; texts as UTF-8."""
    found = {name: [row.text if name == TEXT else getattr(row, name) for row in rows] for name in FIXED}
    found["prompt"] = _storable(found["prompt"], functools.partial(json.dumps, default=str))
    if images:
        found[SIZES] = [list(row.sizes) for row in rows]
    extra = extra_names(rows)
    of_rewards, of_extra = column_names(reward_names, extra, images)
    for index, column in enumerate(of_rewards):
        found[column] = [row.rewards[index] for row in rows]
    for name, column in zip(extra, of_extra, strict=True):
        found[column] = _storable([row.extra.get(name) for row in rows])
    return found


def _storable(values: list[Any], text: Callable[[Any], str] = str) -> list[Any]:
    """Return the values, or their texts if parquet has no common type for them or can't write it (an empty struct)."""
    try:
        values = [clean(value) for value in values]
        pq.write_table(pa.table({"values": values}), pa.BufferOutputStream())
    except Exception:  # Arrow's own errors, and errors of other objects
        return [None if value is None else clean(text(value)) for value in values]
    return values


# -- writing


def write_log(
    run_dir: str | Path,
    rows: Sequence[CompletionRow],
    reward_names: Sequence[str],
    step: int,
    kind: str = "completions",
    images: bool = False,
) -> Path:
    """Write the completions of a step, or of the evaluation ``kind`` after it. A file is either complete or absent."""
    data = columns(rows, reward_names, images)
    data[TEXT] = pa.array(data[TEXT], pa.string())
    table = pa.table(data)
    named: dict[bytes, Any] = {NAMES_KEY: list(reward_names), EXTRA_KEY: extra_names(rows)}
    if images:
        table = table.set_column(table.column_names.index(SIZES), SIZES, pa.array(data[SIZES], pa.list_(pa.string())))
        named |= {IMAGES_KEY: [IMAGES, SIZES], b"huggingface": IMAGE_FEATURE}
    table = table.replace_schema_metadata({key: json.dumps(names).encode() for key, names in named.items()})
    folder = Path(run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{step:05d}.parquet"
    aside = path.with_suffix(".partial")
    schema = table.schema.append(pa.field(IMAGES, IMAGE_TYPE)) if images else table.schema
    try:
        with pq.ParquetWriter(aside, schema, write_page_checksum=True) as file:
            for first in range(0, max(len(rows), 1), ROWS):  # Arrow repeats the pictures for each row
                part = table.slice(first, ROWS)
                if images:
                    chosen = rows[first : first + ROWS]
                    small = [[{"bytes": each, "path": None} for each in row.thumbnails] for row in chosen]
                    part = part.append_column(schema.field(IMAGES), pa.array(small, IMAGE_TYPE))
                file.write_table(part)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)  # a full disk has room again
        raise
    return path


# -- reading


class CompletionFile:
    """A file of completions of ``size`` bytes, written here or by TRL. TRL's names no rewards.

    Rows that unpack to more than PACKING times its size, or to half of the free memory, are an error.
    """

    def __init__(self, source: Path | BinaryIO, size: int) -> None:
        self._file = pq.ParquetFile(source, thrift_container_size_limit=LARGEST_LIST, page_checksum_verification=True)
        metadata = self._file.schema_arrow.metadata or {}
        self.reward_names, self._extra_names = (_names(metadata.get(key, b"[]")) for key in (NAMES_KEY, EXTRA_KEY))
        self.has_images = IMAGES_KEY in metadata
        self._columns = column_names(self.reward_names, self._extra_names, self.has_images)
        self._most_bytes = min(PACKING * size + 2**26, psutil.virtual_memory().available // 2)

    def rows(self, pictures: bool) -> Iterator[dict[str, Any]]:
        """Yield the rows by column, with or without the small ``pictures``. At most ROWS rows are in memory at once."""
        groups = (self._file.metadata.row_group(index) for index in range(self._file.metadata.num_row_groups))
        taken, schema = 0, self._file.schema_arrow
        if sum(group.total_byte_size for group in groups) > self._most_bytes:
            raise ValueError("it says that it holds more than can be packed into it")
        if "dictionary<" in str(schema.types):  # the size of their rows isn't known before unpacking
            raise TypeError("a column is packed as no log's is")
        read = [name for name in schema.names if name != IMAGES] if self.has_images and not pictures else None
        for batch in self._file.iter_batches(batch_size=ROWS, columns=read, use_threads=False):
            taken += batch.nbytes + ROW_BYTES * batch.num_rows
            if taken > self._most_bytes:
                raise ValueError(f"its rows take more than {self._most_bytes:,} bytes")
            yield from batch.to_pylist()

    def rewards(self, row: Mapping[str, Any]) -> list[Any]:
        return [row[column] for column in self._columns[0]]

    def extra(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: row[column] for name, column in zip(self._extra_names, self._columns[1], strict=True)}


def _names(json_list: bytes) -> list[str]:
    names = json.loads(json_list)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{json_list[:50]!r} are no names of columns")
    return names


def read_log(path: Path) -> tuple[list[CompletionRow], list[str]]:
    """Read the rows of a file, without their small pictures, and the names of their rewards."""
    try:
        file = CompletionFile(path, path.stat().st_size)
        rows = [
            CompletionRow(
                step=int(row["step"]),
                position=int(row["position"]),
                prompt_tokens=int(row["prompt_tokens"]),
                completion_tokens=int(row["completion_tokens"]),
                prompt=prompt_of(row["prompt"]),
                text=row[TEXT].encode(),
                finish_reason=str(row["finish_reason"]),
                advantage=float(row["advantage"]),
                rewards=tuple(math.nan if value is None else float(value) for value in file.rewards(row)),
                extra=file.extra(row),
                sizes=tuple(map(str, row[SIZES] or ())) if file.has_images else (),
            )
            for row in file.rows(pictures=False)
        ]
        return rows, file.reward_names
    except (pa.ArrowException, *NONSENSE) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} can't be read ({type(error).__name__}: {reason}): it is damaged, or no completions log. Show "
            "another step, or bring it back from a copy."
        ) from None


def prompt_of(logged: Any) -> Any:
    """Convert a logged prompt to the dataset's form: messages if the file has them as JSON."""
    if isinstance(logged, str) and logged.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(logged)
            if found and isinstance(found, list) and all(isinstance(message, dict) for message in found):
                return found
    return logged


def logged_steps(run_dir: Path) -> dict[int, Path]:
    """Map the steps with logged completions to their files, in order."""
    paths = {path.stem.removeprefix("completions_"): path for path in (run_dir / FOLDER).glob("completions_*.parquet")}
    return dict(sorted((int(number), path) for number, path in paths.items() if number.isdigit()))
