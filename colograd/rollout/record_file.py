"""Append-only files of checksummed records.

    file:    magic | record | record | ...
    record:  position, compressed size, uncompressed size, CRC-32 | compressed content

A killed process may leave an incomplete last record. Readers stop at the first incomplete or damaged record."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

MAGIC = b"colograd records 1\n"
HEAD = struct.Struct("<qIII")  # Header of a record: position, compressed size, uncompressed size, CRC-32.
LARGEST = 2**31 - 1
GROWTH = 4096  # Maximum ratio of the sizes in a header. A damaged uncompressed size could exhaust the memory.
FIGURES = "steps.jsonl"

TABLE = pa.schema(
    [
        ("input", pa.list_(pa.int32())),  # Token ids of the prompt. Null: equal to the first row's.
        ("completion", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampled", pa.list_(pa.bool_())),  # Per token: whether the model wrote it. Null: it wrote all.
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("messages", pa.string()),  # Messages after the prompt, as JSON.
        ("columns", pa.string()),  # Columns of this completion for reward functions, as JSON.
        ("rewards", pa.list_(pa.float32())),
        ("example", pa.string()),  # Digest of the dataset row.
        ("logged", pa.string()),  # Values logged for the whole group as JSON, only in the first row.
    ]
)


class Record(NamedTuple):
    position: int
    content: bytes


class RecordFile:
    """A file of records, open to append by one writer.

    Opening the file cuts off the first incomplete or damaged record, and all bytes after it."""

    def __init__(self, path: Path) -> None:
        self.path, self.positions, end = path, set[int](), len(MAGIC)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if path.is_file() else "w+b")  # noqa: SIM115 (closed by `close`)
        for position, length, size, raw in heads(self._file):
            if _head(position, self._file.read(length), size) != raw:
                break
            self.positions.add(position)
            end += HEAD.size + length
        self.is_new = not self.positions
        self.digests: dict[int, str] = {}  # Position -> digest of the dataset row, taken before user code ran.
        self._file.truncate(end)
        self._file.seek(0)
        self._file.write(MAGIC)
        self._file.seek(end)
        self._packing = pa.Codec("zstd")

    def append(self, record: Record) -> None:
        """Append a record. It survives a crash of this process, but a failure of the machine only after `flush`."""
        if (size := len(record.content)) > LARGEST:
            raise ValueError(f"A record is too large: {size:,} bytes (maximum: {LARGEST:,}).")
        packed, start = bytes(self._packing.compress(record.content, asbytes=True)), self._file.tell()
        if size > GROWTH * len(packed) or len(packed) >= size:
            packed = record.content  # Not compressed: readers see it by the equal sizes in the header.
        try:
            self._file.write(_head(record.position, packed, size) + packed)
            self._file.flush()
        except OSError:
            self._file = open(self.path, "r+b")  # noqa: SIM115 (the old file object would write its buffer again)
            self._file.truncate(start)
            self._file.seek(start)
            raise
        self.positions.add(record.position)

    def flush(self) -> None:
        """Wait until the appended records are on the disk, so that they survive a failure of the machine."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(
    source: Path | BinaryIO, wanted: Callable[[int], bool] = lambda position: True, largest: int = LARGEST
) -> Iterator[Record]:
    """Yield the records for which ``wanted(position)`` is true and whose content has at most ``largest`` bytes.

    Skip other records unread. Stop at the first record that is incomplete, or that should be yielded but is damaged."""
    packing = pa.Codec("zstd")
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        for position, length, size, raw in heads(file):
            if not wanted(position) or size > largest:
                continue
            packed = file.read(length)
            if _head(position, packed, size) != raw:
                return
            try:
                unpack = size != len(packed)
                content = bytes(packing.decompress(packed, decompressed_size=size, asbytes=True)) if unpack else packed
            except (pa.ArrowException, OSError, ValueError):
                return
            yield Record(position, content)


def heads(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (position, compressed size, uncompressed size, raw header) of each record.

    At each yield, ``file`` is at the beginning of the record's content."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        return
    at = max(start, len(MAGIC))
    while True:
        file.seek(at)
        if len(raw := file.read(HEAD.size)) < HEAD.size:
            return
        position, length, size, _ = HEAD.unpack(raw)
        at += HEAD.size + length
        if at > end or size > min(LARGEST, GROWTH * max(length, 1)):
            return
        yield position, length, size, raw


def _head(position: int, packed: bytes, size: int) -> bytes:
    bare = HEAD.pack(position, len(packed), size, 0)
    return HEAD.pack(position, len(packed), size, zlib.crc32(packed, zlib.crc32(bare)))


def add_step(path: Path, step: int, entry: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # The newline comes first, because a killed run may have left an incomplete last line.
        file.write("\n" * (file.tell() > 0) + json.dumps({"step": step, **entry}))


def steps_in(path: Path, largest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (optimizer step, values) of each intact JSON line in the first ``largest`` characters of a file."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(largest).splitlines()
    for line in lines:
        try:
            entry = json.loads(line)
            step = entry.pop("step")
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue
        if type(step) is int:
            yield step, entry


def table_bytes(mark: bytes, rows: Sequence[Sequence[Any]], schema: Any) -> bytes:
    """Return the bytes ``mark``, followed by ``rows`` as an Arrow table. Return b"" if there are no rows."""
    if not rows:
        return b""
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return mark + bytes(pa.record_batch(columns, schema=schema).serialize().to_pybytes())


def read_table(reader: Any, mark: bytes, schema: Any) -> Any:
    reader.read(len(mark))
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
    batch.validate(full=True)
    return batch
