"""The groups that the HTML report shows: written with notes into the rollout log, read without importing torch.

    RUN/_journal/step-00000012/rank-00000.shown       only groups that the report shows (old rounds, or `journal: off`)

A JSON record per step, with the position NOTES - step, names the step's shown groups, with the trainer's
log-probabilities, the advantages and the tokens' texts. `shown` reads `.records` and `.shown` files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from ...rollout.record_file import TABLE, Record, RecordFile, heads, read_records

if TYPE_CHECKING:
    from ...rollout.group_records import RewardedGroup
    from ...rollout.store import RolloutStore

NOTES = -2  # The record with the report's notes on optimizer step s has position NOTES - s.
SHOWN = ".shown"  # Suffix of a file that holds only the groups that the report shows.
LARGEST_SHOWN = 2**28  # Maximum bytes of a recorded group. The report skips larger ones.


def show(store: RolloutStore, notes: Mapping[str, Any], groups: Sequence[RewardedGroup]) -> None:
    """Record some groups of an optimizer step, with ``notes``, for the HTML report. Before old
    rounds are deleted, `kept_records` copies them. With `journal: off` the groups are written to a `.shown` file."""
    from ...rollout.group_records import group_bytes

    step, training = notes["step"], notes["purpose"] == "train"
    evaluation = "" if training else notes["purpose"]
    record = Record(NOTES - step, json.dumps(notes, default=str).encode())
    if (file := store.open_files.get(evaluation)) is not None:
        for recorded in groups:
            if recorded.group.position not in file.positions:
                store.append(evaluation, recorded)
        file.append(record)
        return
    folder = store.round_folder(step - 1 if training else step, evaluation)
    with contextlib.closing(RecordFile((folder / store.file_name).with_suffix(SHOWN))) as alone:
        for recorded in groups:
            alone.append(Record(recorded.group.position, reduced(group_bytes(recorded), notes["tokens"])))
        alone.append(record)


def kept_records(folder: Path) -> list[Path]:
    """Copy a round's groups that the report shows to `.shown` files, and return the folder's `.shown` files."""
    from ...rollout.group_records import NONSENSE

    for path in folder.glob("rank-*.records"):
        with contextlib.suppress(pa.ArrowException, *NONSENSE):
            keep_shown(path)
    return [*folder.glob(f"*{SHOWN}")]


def record_positions(file: BinaryIO, start: int = 0) -> tuple[list[int], int]:
    """Return the positions of the records from byte ``start`` on, and the last record's end. Checks no checksums."""
    found, end = [], start
    for position, length, _, _ in heads(file, start):
        found.append(position)
        end = file.tell() + length
    return found, end


def steps_of(positions: list[int]) -> set[int]:
    return {NOTES - position for position in positions if position <= NOTES}


def reduced(group: bytes, tokens: int) -> bytes:
    """Shorten a recorded group: keep the first ``tokens`` of each completion, drop prompts and riders (e.g. images)."""
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
