"""Convert scored groups to the bytes that the rollout log stores, and back.

The bytes are an Arrow table with a row per completion. Tables of riders (data of extensions) may follow."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout
from ..riders import riding
from ..runtime.registry import hooks
from .record_file import TABLE

# Errors that reading damaged or untrusted bytes may raise.
NONSENSE = (
    AssertionError, AttributeError, IndexError, KeyError, MemoryError, OSError, OverflowError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip


class JournalError(ValueError):
    says_all = True


@dataclasses.dataclass(frozen=True, slots=True)
class RewardedGroup:
    group: Group
    rewards: torch.Tensor  # float32 [G completions, R reward functions]
    logged: Logged


def digest_of_example(example: Mapping[str, Any]) -> str:
    def named(value: Any) -> str:
        name = type(value).__name__
        if hasattr(value, "tobytes") and hasattr(value, "size"):
            return f"{name} {value.size} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
        return name

    text = json.dumps(dict(example), sort_keys=True, default=named)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def group_bytes(recorded: RewardedGroup, example: str = "") -> bytes:
    """Serialize a scored group.

    ``example`` is the digest of the group's dataset row, taken before user code could change the row. Default: the
    row's present digest."""
    example = example or digest_of_example(recorded.group.example)
    rollouts, first, logged = recorded.group.rollouts, recorded.group.rollouts[0].input, recorded.logged
    riders = riding(rollouts)
    kinds = [kind for kind in hooks("riders") if kind in riders] if riders else []
    of_group: dict[str, Any] = {"columns": logged.columns, "metrics": logged.metrics}
    for kind in (kind for kind in kinds if kind.KEY):
        of_kind = (rollout.get(kind) for rollout in rollouts)
        of_group[kind.KEY] = [[] if rider is None else rider.to_json() for rider in of_kind]
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
    return table + b"".join(kind.table(rollouts) for kind in kinds if kind.MARK)


def group_of(content: bytes, prompt: Prompt, encoder: Any = None) -> RewardedGroup:
    """Read a scored group from the bytes that `group_bytes` made. ``encoder`` (`PromptRules.reader`) reads images.

    Raises:
        JournalError: the bytes are damaged, or belong to another dataset row than ``prompt``."""
    where = f"the journal's group at position {prompt.position}"
    try:
        reader = pa.BufferReader(content)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), TABLE)
        batch.validate(full=True)
        rows = batch.select(["input", "sampled", "finish_reason", "policy_version", "messages", "columns"]).to_pylist()
        first, rollouts = tuple(rows[0]["input"]), list[Rollout]()
        inputs = {prompt.input.ids: prompt.input}
        for index, row in enumerate(rows):
            prompt_ids = first if row["input"] is None else tuple(row["input"])
            ids = array("i", np.array(batch["completion"][index].values, dtype=np.int32).tobytes())
            logprobs = torch.tensor(np.array(batch["logprobs"][index].values, dtype=np.float32))
            sampled = torch.tensor([True] * len(ids) if row["sampled"] is None else row["sampled"], dtype=torch.bool)
            assert len(ids) == len(logprobs) == len(sampled), "lengths differ"
            end, version = FinishReason(row["finish_reason"]), int(row["policy_version"])
            messages, own = tuple(json.loads(row["messages"])), json.loads(row["columns"])
            read = inputs.setdefault(prompt_ids, ModelInput(prompt_ids))
            rollouts.append(Rollout(read, ids, logprobs, sampled, end, version, messages, own))
        while reader.tell() < reader.size():
            riders = (kind for kind in hooks("riders") if kind.MARK and content.startswith(kind.MARK, reader.tell()))
            kind = next(riders, None)
            assert kind is not None, "unknown content"
            rollouts = [*kind.with_table(reader, rollouts, encoder)]
        rewards = torch.tensor(np.array(batch["rewards"].to_pylist(), dtype=np.float32))
        assert rewards.dim() == 2, "rewards differ in number"
        logged = json.loads(batch["logged"][0].as_py())
        for kind in (kind for kind in hooks("riders") if kind.KEY in logged):
            pairs = zip(rollouts, logged[kind.KEY], strict=True)
            rollouts = [one.carrying(kind.from_json(value, one)) if value else one for one, value in pairs]
        columns = {str(name): tuple(values) for name, values in logged["columns"].items()}
        metrics = {str(name): (float(total), int(count)) for name, (total, count) in logged["metrics"].items()}
        example = batch["example"][0].as_py()
    except (pa.ArrowException, *NONSENSE) as error:
        problem = f"{where} can't be read ({type(error).__name__}: {error})"
        raise JournalError(f"{problem}: move the run's folder `_journal` away to sample anew.") from None
    if example != digest_of_example(prompt.example):
        remedy = "restore the dataset, or move the journal (the recorded groups) away to sample anew"
        raise JournalError(f"{where} is of another prompt, because the dataset or its order has changed: {remedy}.")
    return RewardedGroup(Group(prompt.example, tuple(rollouts), prompt.position), rewards, Logged(columns, metrics))


def _lists(rows: list[np.ndarray]) -> pa.Array:
    """Make an Arrow column of lists from NumPy arrays, without a Python object per number."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _json(value: Any) -> str:
    def named(each: Any) -> str:
        is_picture = hasattr(each, "tobytes") and isinstance(getattr(each, "size", None), tuple)
        return f"{type(each).__name__} {each.size}" if is_picture else str(each)

    return json.dumps(value, default=named)
