"""Append-only files of checksummed records.

    magic | record | record | ...        a record: position, length, unpacked length, CRC-32 of all fields | bytes

A killed process leaves a torn last record, which is dropped. In a damaged file, the records before the damage are read.
Records are compressed with zstd.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

MAGIC = b"colograd records 1\n"
HEAD = struct.Struct("<qIII")  # position, packed bytes, unpacked bytes, CRC-32 of these and of the packed record
LARGEST = 2**31 - 1  # maximum bytes of a record when unpacked
GROWTH = 4096  # maximum ratio of unpacked to packed bytes: content that zstd packs tighter isn't packed


class Record(NamedTuple):
    position: int
    content: bytes


class RecordFile:
    """Appends records to a file behind its last whole record. Only one process at a time may write a file."""

    def __init__(self, path: Path) -> None:
        self.path, whole = path, len(MAGIC)
        if path.is_file():
            whole = max(whole, whole_bytes(path))
        self.is_new = whole == len(MAGIC)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if path.is_file() else "w+b")  # noqa: SIM115 (closed by `close`)
        self._file.truncate(whole)
        self._file.seek(0)
        self._file.write(MAGIC)
        self._file.seek(whole)
        self._packing = pa.Codec("zstd")

    def append(self, record: Record) -> int:
        """Write a record, so that it survives this process. Return the number of bytes written."""
        if len(record.content) > LARGEST:
            raise ValueError(f"A record has {len(record.content):,} bytes, but may have at most {LARGEST:,}.")
        packed = bytes(self._packing.compress(record.content, asbytes=True))
        if len(record.content) > GROWTH * len(packed) or len(packed) >= len(record.content):
            packed = record.content  # equal lengths tell the reader that the record isn't packed
        start = self._file.tell()
        try:
            self._file.write(_head(record.position, packed, len(record.content)) + packed)
            self._file.flush()
        except OSError:
            self._file = open(self.path, "r+b")  # noqa: SIM115 (the old one would write its buffer again)
            self._file.truncate(start)
            self._file.seek(start)
            raise
        return HEAD.size + len(packed)

    def flush(self) -> None:
        """Write the records to the disk, so that they survive a failure of the machine."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(
    source: Path | BinaryIO, wanted: Callable[[int], bool] = lambda position: True, largest: int = LARGEST
) -> Iterator[Record]:
    """Yield the whole records of a file, up to the first torn or damaged one. A damaged length can't exhaust memory:
    the file's size bounds the bytes of a record."""
    packing = pa.Codec("zstd")
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        for position, length, size, raw in _heads(file):
            if not wanted(position) or size > largest:
                continue
            packed = file.read(length)
            if _head(position, packed, size) != raw:
                return
            try:
                content = packed
                if size != len(packed):
                    content = bytes(packing.decompress(packed, decompressed_size=size, asbytes=True))
            except (pa.ArrowException, OSError, ValueError):  # not written by a `RecordFile`
                return
            yield Record(position, content)


def positions(file: BinaryIO, start: int = 0) -> tuple[list[int], int]:
    """Return the positions of the records from byte ``start`` on, and the byte after the last. Checks no contents."""
    found, end = [], start
    for position, length, _, _ in _heads(file, start):
        found.append(position)
        end = file.tell() + length
    return found, end


def whole_bytes(path: Path) -> int:
    """Return the bytes of a file up to the end of its last whole record, or 0 if it isn't a record file."""
    found = 0
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            found = len(MAGIC)
        for position, length, size, raw in _heads(file):
            if _head(position, file.read(length), size) != raw:
                break
            found += HEAD.size + length
    return found


def _heads(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (position, packed bytes, unpacked bytes, raw head) of each record, with the file at the packed bytes."""
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
