"""Tables that may stand behind a group's own in its record: each begins with a mark, as no message of arrow does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def table_bytes(mark: bytes, rows: Sequence[Sequence[Any]], schema: Any) -> bytes:
    """Nothing of no rows."""
    if not rows:
        return b""
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return mark + bytes(pa.record_batch(columns, schema=schema).serialize().to_pybytes())


def comes(reader: Any, mark: bytes) -> bool:
    """Whether the table with the mark is what comes next."""
    at = reader.tell()
    found = reader.read(len(mark)) == mark
    reader.seek(at)
    return found


def read_table(reader: Any, mark: bytes, schema: Any) -> Any:
    """The batch of the table that comes next, checked."""
    reader.read(len(mark))
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
    batch.validate(full=True)
    return batch
