"""Append-only files of checksummed records.

    magic | record | record | ...        a record: position, length, unpacked length, CRC-32 of all fields | bytes

If a process is killed, the last record may be incomplete. Readers drop an incomplete record. In a damaged file, the
records before the damage are readable. Records are compressed with zstd.

`add_step` and `steps_in` write and read JSON lines files with a line per optimizer step, e.g. its exact loss. `shown`
reads recorded groups for the HTML report, without importing torch. Some groups have notes: a JSON record per step with
the trainer's log-probabilities, the advantages and the tokens' texts.
"""

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
import pyarrow.compute as pc

MAGIC = b"colograd records 1\n"
HEAD = struct.Struct("<qIII")  # A record's position, compressed size, uncompressed size, and CRC-32.
LARGEST = 2**31 - 1  # Maximum bytes of an uncompressed record.
GROWTH = 4096  # Maximum compression ratio. Content that zstd would compress further is stored uncompressed.
FIGURES = "steps.jsonl"
LARGEST_FIGURES = 2**24  # maximum number of bytes that are read of `steps.jsonl`
NOTES = -2  # The record with the report's notes on optimizer step s has position NOTES - s.
SHOWN = ".shown"  # Suffix of a file that holds only the groups that the report shows.
LARGEST_SHOWN = (
    2**28
)  # Maximum bytes of a recorded group that the report reads. `reduced` makes a group's record smaller.

TABLE = pa.schema(
    [
        ("input", pa.list_(pa.int32())),  # Prompt ids of a completion. Null means: as in the table's first row.
        ("completion", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("sampled", pa.list_(pa.bool_())),  # For each completion token, whether the model sampled it. Null means: all.
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("messages", pa.string()),  # Chat messages of a completion, as JSON.
        ("columns", pa.string()),  # Arguments of reward functions for a completion, as JSON.
        ("rewards", pa.list_(pa.float32())),
        ("example", pa.string()),  # Digest of the prompt's dataset row.
        ("logged", pa.string()),  # Values of the whole group as JSON, in the first row. Other rows have "".
    ]
)


class Record(NamedTuple):
    position: int
    content: bytes


class RecordFile:
    """Appends records to a file, after dropping an incomplete record at its end. A file may have only one writer."""

    def __init__(self, path: Path) -> None:
        self.path, self.positions, end = path, set[int](), len(MAGIC)  # `positions` has the positions of all records.
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "r+b" if path.is_file() else "w+b")  # noqa: SIM115 (closed by `close`)
        for position, length, size, raw in _heads(self._file):
            if _head(position, self._file.read(length), size) != raw:
                break
            self.positions.add(position)
            end += HEAD.size + length
        self.is_new = not self.positions
        self._file.truncate(end)
        self._file.seek(0)
        self._file.write(MAGIC)
        self._file.seek(end)
        self._packing = pa.Codec("zstd")

    def append(self, record: Record) -> None:
        """Write a record, so that it survives a crash of this process."""
        if len(record.content) > LARGEST:
            raise ValueError(f"A recorded group is too large: {len(record.content):,} bytes (maximum: {LARGEST:,}).")
        packed = bytes(self._packing.compress(record.content, asbytes=True))
        if len(record.content) > GROWTH * len(packed) or len(packed) >= len(record.content):
            packed = record.content  # readers detect an uncompressed record by its equal lengths
        start = self._file.tell()
        try:
            self._file.write(_head(record.position, packed, len(record.content)) + packed)
            self._file.flush()
        except OSError:
            self._file = open(self.path, "r+b")  # noqa: SIM115 (the old one would write its buffer again)
            self._file.truncate(start)
            self._file.seek(start)
            raise
        self.positions.add(record.position)

    def flush(self) -> None:
        """Flush the written records to the disk, so that they survive a failure of the machine."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(
    source: Path | BinaryIO, wanted: Callable[[int], bool] = lambda position: True, largest: int = LARGEST
) -> Iterator[Record]:
    """Yield a file's records up to the first incomplete or damaged record. Skip a record if ``wanted(position)`` is
    false, or if the record has more than ``largest`` uncompressed bytes."""
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
            except (pa.ArrowException, OSError, ValueError):  # content that no `RecordFile` has written
                return
            yield Record(position, content)


def positions(file: BinaryIO, start: int = 0) -> tuple[list[int], int]:
    """Return the positions of the records from byte ``start`` on, and the last record's end. Checks no checksums."""
    found, end = [], start
    for position, length, _, _ in _heads(file, start):
        found.append(position)
        end = file.tell() + length
    return found, end


def _heads(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (position, compressed bytes, uncompressed bytes, raw header) of each record, with the file positioned at
    the record's content. A damaged length can't exhaust memory, because the file's size and GROWTH bound lengths."""
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


def note_figures(folder: Path, step: int, figures: Mapping[str, float]) -> None:
    add_step(folder / FIGURES, step, figures)


def read_figures(folder: Path) -> dict[int, dict[str, float]]:
    """Read `steps.jsonl`: optimizer step -> loss and gradient norm. If a step has several lines, the first counts."""
    figures_of = dict[int, dict[str, float]]()
    for step, entry in steps_in(folder / FIGURES, LARGEST_FIGURES):
        try:
            figures_of.setdefault(step, {str(name): float(value) for name, value in entry.items()})
        except (ValueError, TypeError, OverflowError):
            continue
    return figures_of


def add_step(path: Path, step: int, entry: Mapping[str, Any]) -> None:
    """Append the line of an optimizer step to a JSON lines file. Create the file if it doesn't exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # Write the newline before the line, so that an incomplete line of a killed run doesn't damage the new line.
        file.write("\n" * (file.tell() > 0) + json.dumps({"step": step, **entry}))


def steps_in(path: Path, largest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, values) for each JSON line in the file's first ``largest`` bytes. Skip incomplete lines."""
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


def steps_of(positions: list[int]) -> set[int]:
    return {NOTES - position for position in positions if position <= NOTES}


def reduced(group: bytes, tokens: int) -> bytes:
    """Shorten a recorded group: keep the first ``tokens`` of each completion, drop prompts, router data and images."""
    return bytes(_first_tokens(group, tokens).serialize().to_pybytes())


def _first_tokens(group: bytes, tokens: int) -> pa.RecordBatch:
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.BufferReader(group)), TABLE)
    batch.validate(full=True)
    columns = {name: batch[name] for name in TABLE.names} | {"input": pa.nulls(len(batch), TABLE.field("input").type)}
    for name in ("completion", "logprobs", "sampled"):
        columns[name] = pc.list_slice(batch[name], 0, tokens, return_fixed_size_list=False)
    return pa.record_batch(list(columns.values()), schema=TABLE)


def keep_shown(path: Path) -> None:
    """Copy the groups that the report shows from a record file to a `.shown` file. If there are none, write nothing."""
    notes = list(read_records(path, lambda position: position <= NOTES))
    if not notes:
        return
    tokens: dict[int, int] = {}
    for entry in (json.loads(record.content) for record in notes):
        tokens |= {group["position"]: entry["tokens"] for group in entry["groups"]}
    with contextlib.closing(RecordFile(path.with_suffix(SHOWN))) as file:
        for record in read_records(path, tokens.__contains__):
            file.append(Record(record.position, reduced(record.content, tokens[record.position])))
        for record in notes:
            file.append(record)


def shown(file: BinaryIO, step: int) -> Iterator[dict[str, Any]]:
    """Yield a dict for each completion of an optimizer step that the report shows, read from a record file."""
    all_notes = [
        json.loads(record.content) for record in read_records(file, lambda at: at == NOTES - step, LARGEST_SHOWN)
    ]
    wanted = {group["position"] for notes in all_notes for group in notes["groups"]}
    groups = {record.position: record.content for record in read_records(file, wanted.__contains__, LARGEST_SHOWN)}
    for notes in all_notes:
        yield from entries(notes, groups)


def entries(notes: Mapping[str, Any], groups: Mapping[int, bytes]) -> Iterator[dict[str, Any]]:
    """Yield a dict for each completion in ``notes``: tokens as texts, log-probabilities, rewards, advantages. Groups
    that ``groups`` (position -> recorded group) lacks are skipped."""
    for noted in notes["groups"]:
        if noted["position"] not in groups:
            continue
        rows = _first_tokens(groups[noted["position"]], notes["tokens"]).to_pylist()
        logged = json.loads(rows[0]["logged"])["columns"]
        for index, (row, own) in enumerate(zip(rows, noted["completions"], strict=True)):
            messages, session = json.loads(row["messages"]), json.loads(row["columns"]).get("session")
            yield {
                "step": notes["step"],
                "purpose": notes["purpose"],
                "position": noted["position"],
                "index": index,
                "prompt": noted["prompt"],
                "tokens": [notes["texts"].get(str(token), f"<{token}>") for token in row["completion"]],
                "sampler": row["logprobs"],
                "sampled": [1] * len(row["completion"]) if row["sampled"] is None else [*map(int, row["sampled"])],
                "rewards": dict(zip(notes["rewards"], row["rewards"], strict=True)),
                "finish": row["finish_reason"],
                "extra": {name: values[index] for name, values in logged.items()},
                **({"messages": messages} if messages else {}),
                **({"session": session} if session else {}),
                **own,
            }


# Optional tables follow a group's table of completions. Each optional table begins with marker bytes, which differ from
# the first bytes of any Arrow message.


def table_bytes(mark: bytes, rows: Sequence[Sequence[Any]], schema: Any) -> bytes:
    """Serialize rows to the marker bytes ``mark`` and an Arrow message. Return b"" if there are no rows."""
    if not rows:
        return b""
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return mark + bytes(pa.record_batch(columns, schema=schema).serialize().to_pybytes())


def read_table(reader: Any, mark: bytes, schema: Any) -> Any:
    reader.read(len(mark))
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
    batch.validate(full=True)
    return batch
