"""Optional tables behind a group's own table in its record. Each begins with a mark, unlike any Arrow message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def table_bytes(mark: bytes, rows: Sequence[Sequence[Any]], schema: Any) -> bytes:
    """Return the mark and the bytes of a table, or nothing if there are no rows."""
    if not rows:
        return b""
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return mark + bytes(pa.record_batch(columns, schema=schema).serialize().to_pybytes())


def comes(reader: Any, mark: bytes) -> bool:
    """Return whether the table with the mark comes next."""
    at = reader.tell()
    found = reader.read(len(mark)) == mark
    reader.seek(at)
    return found


def read_table(reader: Any, mark: bytes, schema: Any) -> Any:
    """Read and validate the table that comes next."""
    reader.read(len(mark))
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
    batch.validate(full=True)
    return batch
