"""A group as the bytes of a record, and back.

The record holds a table of the completions, then routed experts, the tokens kept by truncated sampling, and pictures.
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

from ..batch import Branch, FinishReason, Group, Logged, ModelInput, Prompt, Rollout, RoutedExperts, VersionSpan
from ..extensions.images.data import ImageReader
from ..extensions.kept_tokens import record as kept_record
from ..extensions.kept_tokens.record import kept_bytes, with_kept
from ..extensions.tools import pictures
from ..extensions.tools.pictures import pictures_bytes, with_pictures
from .group_table import TABLE
from .marked_table import comes

# Errors that reading untrusted bytes may raise.
NONSENSE = (
    AssertionError, AttributeError, IndexError, KeyError, MemoryError, OSError, OverflowError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip

# Table of routed experts, with `router_replay` (see `batch.RoutedExperts`). A null `prompt` equals the row before's.
EXPERTS = pa.schema(
    [pa.field("prompt", pa.binary()), pa.field("completion", pa.binary()), pa.field("shape", pa.list_(pa.int32()))]
)


class JournalError(ValueError):
    """The records don't fit this run."""

    says_all = True  # see `process.tell_briefly`


@dataclasses.dataclass(frozen=True, slots=True)
class RewardedGroup:
    """A scored group before it gets advantages."""

    group: Group
    rewards: torch.Tensor  # [G, R] float32
    logged: Logged


def digest_of_example(example: Mapping[str, Any]) -> str:
    """Return a digest of a dataset's row. A value without a JSON type counts as its type, an image with its pixels."""
    text = json.dumps(dict(example), sort_keys=True, default=_named)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _named(value: Any) -> str:
    name = type(value).__name__
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{name} {value.size} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    return name


def group_bytes(recorded: RewardedGroup, example: str = "") -> bytes:
    """Write a group as the bytes of a record.

    Args:
        example: digest of the dataset's row from before the user's code saw it; empty: compute it now.
    """
    example = example or digest_of_example(recorded.group.example)
    rollouts, first, logged = recorded.group.rollouts, recorded.group.rollouts[0].input, recorded.logged
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
        pa.array([_json(_of_group(logged, rollouts)), *[""] * (len(rollouts) - 1)]),
    ]
    table: bytes = pa.record_batch(columns, schema=TABLE).serialize().to_pybytes()
    return table + _experts_bytes(rollouts) + kept_bytes(rollouts) + pictures_bytes(rollouts)


def _of_group(logged: Logged, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the first row's entries for the whole group: logged values, branches of trees, versions of tokens."""
    found: dict[str, Any] = {"columns": logged.columns, "metrics": logged.metrics}
    if any(rollout.branches for rollout in rollouts):
        found["branches"] = [[dataclasses.astuple(branch) for branch in rollout.branches] for rollout in rollouts]
    if any(rollout.spans for rollout in rollouts):
        found["spans"] = [[dataclasses.astuple(span) for span in rollout.spans] for rollout in rollouts]
    return found


def _with_spans(rollouts: Sequence[Rollout], spans: Sequence[Sequence[Sequence[Any]]]) -> tuple[Rollout, ...]:
    found = []
    for rollout, of_one in zip(rollouts, spans, strict=True):
        read = tuple(VersionSpan(int(length), int(version)) for length, version in of_one)
        assert not read or sum(span.length for span in read) == len(rollout.completion_ids), "versions don't fit"
        found.append(dataclasses.replace(rollout, spans=read))
    return tuple(found)


def _with_branches(rollouts: Sequence[Rollout], branches: Sequence[Sequence[Sequence[Any]]]) -> tuple[Rollout, ...]:
    found = []
    for rollout, of_one in zip(rollouts, branches, strict=True):
        tree = tuple(Branch(int(length), after, int(prompt)) for length, after, prompt in of_one)
        assert not tree or sum(branch.length for branch in tree) == len(rollout.completion_ids), "branches don't fit"
        found.append(dataclasses.replace(rollout, branches=tree))
    return tuple(found)


def _experts_bytes(rollouts: Sequence[Rollout]) -> bytes:
    if all(rollout.experts is None for rollout in rollouts):
        return b""
    prompt: torch.Tensor | None = None
    rows: list[tuple[Any, Any, Any]] = []
    for experts in (rollout.experts for rollout in rollouts):
        if experts is None:
            rows.append((None, None, None))
            continue
        known = prompt is not None and torch.equal(prompt, experts.prompt)
        prompt = experts.prompt
        parts = (None if known else experts.prompt, experts.completion)
        first, second = (None if part is None else part.numpy().tobytes() for part in parts)
        rows.append((first, second, [*experts.completion.shape[1:], experts.completion.element_size()]))
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), EXPERTS, strict=True)]
    return bytes(pa.record_batch(columns, schema=EXPERTS).serialize().to_pybytes())


def _experts_of(reader: Any, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    if reader.tell() == reader.size() or any(comes(reader, mark) for mark in (kept_record.BEGIN, pictures.BEGIN)):
        return tuple(rollouts)
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), EXPERTS)
    batch.validate(full=True)
    found: list[Rollout] = []
    prompt: torch.Tensor | None = None
    for rollout, row in zip(rollouts, batch.to_pylist(), strict=True):
        if row["shape"] is not None:
            if row["prompt"] is not None:
                prompt = _numbers(row["prompt"], len(rollout.input), *row["shape"])
            assert prompt is not None and len(prompt) == len(rollout.input), "the prompt's experts are missing"
            experts = RoutedExperts(prompt, _numbers(row["completion"], len(rollout.completion_ids), *row["shape"]))
            rollout = dataclasses.replace(rollout, experts=experts)
        found.append(rollout)
    return tuple(found)


def _numbers(content: bytes, tokens: int, layers: int, chosen: int, width: int) -> torch.Tensor:
    """Return a (tokens, layers, chosen) tensor from numbers of ``width`` bytes."""
    kind = {1: np.int8, 2: np.int16}[width]
    return torch.tensor(np.frombuffer(content, dtype=kind).reshape(tokens, layers, chosen))


def group_of(content: bytes, prompt: Prompt, images: ImageReader | None = None) -> RewardedGroup:
    """Read a group from the bytes that `group_bytes` wrote.

    Raises:
        JournalError: the group is of another prompt, or the bytes are damaged.
    """
    where = f"the journal's group at position {prompt.position}"
    try:
        reader = pa.BufferReader(content)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), TABLE)
        batch.validate(full=True)
        assert batch.num_rows > 0, "no rows"
        asked = _input(batch.column("input")[0].as_py(), prompt)
        rollouts = _experts_of(reader, [_rollout(batch, row, asked, prompt) for row in range(batch.num_rows)])
        rollouts = with_pictures(reader, with_kept(reader, rollouts), images)
        rewards = torch.tensor(np.array(batch.column("rewards").to_pylist(), dtype=np.float32))
        assert rewards.dim() == 2, "rewards differ in number"
        logged = json.loads(batch.column("logged")[0].as_py())
        if "branches" in logged:
            rollouts = _with_branches(rollouts, logged["branches"])
        if "spans" in logged:
            rollouts = _with_spans(rollouts, logged["spans"])
        columns = {str(name): tuple(values) for name, values in logged["columns"].items()}
        metrics = {str(name): (float(total), int(count)) for name, (total, count) in logged["metrics"].items()}
        example = batch.column("example")[0].as_py()
    except (pa.ArrowException, *NONSENSE) as error:
        raise JournalError(f"{where} can't be read ({type(error).__name__}: {error}): move the journal away.") from None
    if example != digest_of_example(prompt.example):
        raise JournalError(
            f"{where} is of another prompt: the dataset or its order has changed. Put it back, or move the journal "
            "away to sample anew."
        )
    return RewardedGroup(Group(prompt.example, rollouts, prompt.position), rewards, Logged(columns, metrics))


def _input(ids: Sequence[int], prompt: Prompt) -> ModelInput:
    return prompt.input if tuple(ids) == prompt.input.ids else ModelInput(tuple(ids))


def _rollout(batch: pa.RecordBatch, row: int, asked: ModelInput, prompt: Prompt) -> Rollout:
    def of(name: str) -> Any:
        return batch.column(name)[row]

    ids = array("i", np.array(of("completion").values, dtype=np.int32).tobytes())
    logprobs = torch.tensor(np.array(of("logprobs").values, dtype=np.float32))
    sampled = torch.ones(len(ids), dtype=torch.bool)
    if of("sampled").is_valid:
        sampled = torch.tensor(of("sampled").as_py(), dtype=torch.bool)
    assert len(ids) == len(logprobs) == len(sampled) > 0, "lengths differ"
    return Rollout(
        _input(of("input").as_py(), prompt) if of("input").is_valid else asked,
        ids,
        logprobs,
        sampled,
        FinishReason(of("finish_reason").as_py()),
        int(of("policy_version").as_py()),
        tuple(json.loads(of("messages").as_py())),
        json.loads(of("columns").as_py()),
    )


def _lists(rows: Sequence[np.ndarray]) -> pa.Array:
    """Return rows of numbers as one column, without a Python object per number."""
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _json(value: Any) -> str:
    """Return a value as JSON. Values of other types become their text, a picture its type and size."""
    with contextlib.suppress(TypeError, ValueError):
        return json.dumps(value)
    return json.dumps(
        value, default=lambda each: f"{type(each).__name__} {each.size}" if _is_picture(each) else str(each)
    )


def _is_picture(value: Any) -> bool:
    return hasattr(value, "tobytes") and isinstance(getattr(value, "size", None), tuple)
