"""Read recorded groups for the HTML report, without importing torch.

Some groups have notes: a JSON record per step with values that training added for the report. Notes hold the trainer's
log-probabilities, the advantages and the tokens' texts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from .record_file import Record, RecordFile, read_records

NOTES = -2  # The record with the report's notes on optimizer step s has position NOTES - s.
SHOWN = ".shown"  # Suffix of a file that holds only the groups that the report shows.
LARGEST = 2**28  # Maximum bytes of a recorded group that the report reads. `reduced` makes a group's record smaller.

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
    all_notes = [json.loads(record.content) for record in read_records(file, lambda at: at == NOTES - step, LARGEST)]
    wanted = {group["position"] for notes in all_notes for group in notes["groups"]}
    groups = {record.position: record.content for record in read_records(file, wanted.__contains__, LARGEST)}
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
