"""Serialize a scored group to bytes for the rollout log, and read the group back.

The bytes are an Arrow table of the completions, then a table per kind of riders (per-token data of extensions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..batch import Branch, FinishReason, Group, Logged, ModelInput, Prompt, Rollout
from ..riders import Rider, riding
from ..runtime.registry import hooks
from .group_table import TABLE, comes

# Exceptions that reading damaged or untrusted bytes may raise.
NONSENSE = (
    AssertionError, AttributeError, IndexError, KeyError, MemoryError, OSError, OverflowError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip


class JournalError(ValueError):
    """The recorded groups in the rollout log don't fit this run."""

    says_all = True  # An uncaught error with this attribute is printed as one line, without a traceback.


@dataclasses.dataclass(frozen=True, slots=True)
class RewardedGroup:
    """A group with its rewards, before advantages are computed."""

    group: Group
    rewards: torch.Tensor  # rewards of the group, float32 [completions, reward functions]
    logged: Logged


def digest_of_example(example: Mapping[str, Any]) -> str:
    """Return a digest of a dataset row: JSON values, images' pixels, and the type names of values of other types."""
    text = json.dumps(dict(example), sort_keys=True, default=_named)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _named(value: Any) -> str:
    name = type(value).__name__
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{name} {value.size} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    return name


def group_bytes(recorded: RewardedGroup, example: str = "") -> bytes:
    """Serialize a scored group to the bytes that the rollout log stores. `group_of` reads the bytes.

    Args:
        example: digest of the dataset row, taken before user code could change the row. Empty means: compute it now.
    """
    example = example or digest_of_example(recorded.group.example)
    rollouts, first, logged = recorded.group.rollouts, recorded.group.rollouts[0].input, recorded.logged
    # Values of the whole group, stored in the first row: logged values, branches of tree rollouts, riders as JSON.
    of_group: dict[str, Any] = {"columns": logged.columns, "metrics": logged.metrics}
    if any(rollout.branches for rollout in rollouts):
        of_group["branches"] = [[dataclasses.astuple(branch) for branch in rollout.branches] for rollout in rollouts]
    for kind in (kind for kind in _recorded_kinds(rollouts) if kind.KEY):
        riders = (rollout.get(kind) for rollout in rollouts)
        of_group[kind.KEY] = [[] if rider is None else rider.to_json() for rider in riders]
    inputs = [list(r.input.ids) if not row or r.input != first else None for row, r in enumerate(rollouts)]
    columns = [
        pa.array(inputs, TABLE.field("input").type),
        _lists([np.frombuffer(r.completion_ids, dtype=np.int32) for r in rollouts]),
        _lists([r.sampler_logprobs.numpy() for r in rollouts]),
        pa.array([None if r.sampled.all() else r.sampled.numpy() for r in rollouts], TABLE.field("sampled").type),
        pa.array([r.finish_reason.value for r in rollouts]),
        pa.array([r.policy_version for r in rollouts], pa.int64()),
        pa.array([_json(r.messages) for r in rollouts]),
        pa.array([_json(dict(r.columns)) for r in rollouts]),
        _lists(list(recorded.rewards.float().numpy())),
        pa.array([example] * len(rollouts)),
        pa.array([_json(of_group), *[""] * (len(rollouts) - 1)]),
    ]
    table: bytes = pa.record_batch(columns, schema=TABLE).serialize().to_pybytes()
    return table + riders_bytes(rollouts)


def _recorded_kinds(rollouts: Sequence[Rollout]) -> list[type[Rider]]:
    kinds = riding(rollouts)
    return [kind for kind in hooks("riders") if kind in kinds] if kinds else []


def riders_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """Serialize the rollouts' riders (per-token data of extensions): a table per class, behind the bytes `MARK`."""
    return b"".join(kind.table(rollouts) for kind in _recorded_kinds(rollouts) if kind.MARK)


def with_riders(reader: Any, rollouts: Sequence[Rollout], encoder: Any = None) -> Sequence[Rollout]:
    """Read the rider tables (per-token data of extensions) from ``reader``. Return the rollouts with these riders."""
    while reader.tell() < reader.size():
        kind = next((kind for kind in hooks("riders") if kind.MARK and comes(reader, kind.MARK)), None)
        assert kind is not None, "unknown content"
        rollouts = kind.with_table(reader, rollouts, encoder)
    return rollouts


def group_of(content: bytes, prompt: Prompt, encoder: Any = None) -> RewardedGroup:
    """Read a scored group from the bytes that `group_bytes` returned. Raise JournalError if the bytes are damaged."""
    where = f"the journal's group at position {prompt.position}"
    try:
        reader = pa.BufferReader(content)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), TABLE)
        batch.validate(full=True)
        assert batch.num_rows > 0, "no rows"
        first = _input(batch.column("input")[0].as_py(), prompt)
        rollouts = with_riders(reader, [_rollout(batch, row, first, prompt) for row in range(batch.num_rows)], encoder)
        rewards = torch.tensor(np.array(batch.column("rewards").to_pylist(), dtype=np.float32))
        assert rewards.dim() == 2, "rewards differ in number"
        logged = json.loads(batch.column("logged")[0].as_py())
        for index, rows in enumerate(logged.get("branches", ())):
            tree = tuple(Branch(int(length), after, int(prompt)) for length, after, prompt in rows)
            tokens = len(rollouts[index].completion_ids)
            assert not tree or sum(branch.length for branch in tree) == tokens, "branches don't fit"
            rollouts = [*rollouts[:index], dataclasses.replace(rollouts[index], branches=tree), *rollouts[index + 1 :]]
        for kind in (kind for kind in hooks("riders") if kind.KEY in logged):
            pairs = zip(rollouts, logged[kind.KEY], strict=True)
            rollouts = [one.carrying(kind.from_json(value, one)) if value else one for one, value in pairs]
        columns = {str(name): tuple(values) for name, values in logged["columns"].items()}
        metrics = {str(name): (float(total), int(count)) for name, (total, count) in logged["metrics"].items()}
        example = batch.column("example")[0].as_py()
    except (pa.ArrowException, *NONSENSE) as error:
        raise JournalError(f"{where} can't be read ({type(error).__name__}: {error}): move the journal away.") from None
    if example != digest_of_example(prompt.example):
        raise JournalError(
            f"{where} is of another prompt, because the dataset or its order has changed. Restore the dataset, or move "
            "the journal (the folder of recorded groups) away to sample anew."
        )
    return RewardedGroup(Group(prompt.example, tuple(rollouts), prompt.position), rewards, Logged(columns, metrics))


def _input(ids: Sequence[int], prompt: Prompt) -> ModelInput:
    return prompt.input if tuple(ids) == prompt.input.ids else ModelInput(tuple(ids))


def _rollout(batch: pa.RecordBatch, row: int, first: ModelInput, prompt: Prompt) -> Rollout:
    def of(name: str) -> Any:
        return batch.column(name)[row]

    ids = array("i", np.array(of("completion").values, dtype=np.int32).tobytes())
    logprobs = torch.tensor(np.array(of("logprobs").values, dtype=np.float32))
    sampled = torch.ones(len(ids), dtype=torch.bool)
    if of("sampled").is_valid:
        sampled = torch.tensor(of("sampled").as_py(), dtype=torch.bool)
    assert len(ids) == len(logprobs) == len(sampled), "lengths differ"
    return Rollout(
        _input(of("input").as_py(), prompt) if of("input").is_valid else first,
        ids,
        logprobs,
        sampled,
        FinishReason(of("finish_reason").as_py()),
        int(of("policy_version").as_py()),
        tuple(json.loads(of("messages").as_py())),
        json.loads(of("columns").as_py()),
    )


def _lists(rows: Sequence[np.ndarray]) -> pa.Array:
    """Convert arrays of numbers to one Arrow list column, without a Python object per number."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _json(value: Any) -> str:
    """Convert a value to JSON text. A value that JSON can't hold becomes ``str(value)``, an image its type and size."""
    with contextlib.suppress(TypeError, ValueError):
        return json.dumps(value)

    def named(each: Any) -> str:
        is_picture = hasattr(each, "tobytes") and isinstance(getattr(each, "size", None), tuple)
        return f"{type(each).__name__} {each.size}" if is_picture else str(each)

    return json.dumps(value, default=named)
