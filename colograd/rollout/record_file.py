"""Files of records that are only appended to, and say which of their records are whole.

    magic | record | record | ...        a record: position, bytes, bytes when unpacked, CRC-32 of all that | bytes

A process that is killed leaves a torn last record, which is dropped. Of a file that was changed elsewhere, what lies
before the change is read. Records are packed with zstd.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

MAGIC = b"colograd records 1\n"
HEAD = struct.Struct("<qIII")  # position, bytes, bytes when unpacked, checksum
LARGEST = 2**31 - 1  # bytes of a record when unpacked
GROWTH = 4096  # times that a packed record may be larger when unpacked: what zstd packs tighter isn't packed


class Record(NamedTuple):
    """What one record says, and of which position."""

    position: int
    content: bytes


class RecordFile:
    """Appends records to a file; one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; behind its last whole record, where it goes on."""
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
        """Write a record, so that it survives this process; returns its bytes.

        Raises:
            ValueError: it is too large.
            OSError: the disk is full, or away. What was written of it is taken back where that is possible.
        """
        if len(record.content) > LARGEST:
            raise ValueError(f"A record has {len(record.content):,} bytes, but may have at most {LARGEST:,}.")
        packed = bytes(self._packing.compress(record.content, asbytes=True))
        if len(record.content) > GROWTH * len(packed) or len(packed) >= len(record.content):
            packed = record.content  # as long as when unpacked: a reader sees by that that it isn't packed
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
        """Have the records survive the machine, too."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a file, from its first to the last before one that is torn or was changed.

    Never takes more memory than the file's size says a record can need.
    """
    packing = pa.Codec("zstd")
    for head, packed in _whole(path):
        position, _, size, _ = head
        try:
            content = packed
            if size != len(packed):
                content = bytes(packing.decompress(packed, decompressed_size=size, asbytes=True))
        except (pa.ArrowException, OSError, ValueError):  # made by no `RecordFile`
            return
        yield Record(position, content)


def whole_bytes(path: Path) -> int:
    """The bytes of a file up to the end of its last whole record; 0 if it is no such file."""
    found = 0
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            found = len(MAGIC)
    return found + sum(HEAD.size + len(packed) for _, packed in _whole(path))


def _whole(path: Path) -> Iterator[tuple[tuple[int, int, int, int], bytes]]:
    end = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        while len(raw := file.read(HEAD.size)) == HEAD.size:
            head = position, length, size, _ = HEAD.unpack(raw)
            if length > end - file.tell() or size > min(LARGEST, GROWTH * max(length, 1)):
                return
            packed = file.read(length)
            if _head(position, packed, size) != raw:
                return
            yield head, packed


def _head(position: int, packed: bytes, size: int) -> bytes:
    bare = HEAD.pack(position, len(packed), size, 0)
    return HEAD.pack(position, len(packed), size, zlib.crc32(packed, zlib.crc32(bare)))
