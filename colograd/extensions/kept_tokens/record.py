"""The truncated sampling in a group's record: for each token, the candidates that truncation had left."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ...batch import KeptTokens, Rollout
from ...rollout.marked_table import comes, read_table, table_bytes

BEGIN = b"KEPT SET"
# int32 numbers; null: all tokens of the rollout were drawn from the whole vocabulary.
ROWS = pa.schema([pa.field("ids", pa.binary()), pa.field("counts", pa.binary())])


def kept_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """Return the bytes of a table with a row per rollout, or nothing if no rollout has kept tokens."""
    if all(rollout.kept is None for rollout in rollouts):
        return b""
    rows = [(None, None) if r.kept is None else (_bytes(r.kept.ids), _bytes(r.kept.counts)) for r in rollouts]
    return table_bytes(BEGIN, rows, ROWS)


def with_kept(reader: Any, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Return the rollouts with their kept tokens from the table, if the table comes next."""
    if not comes(reader, BEGIN):
        return tuple(rollouts)
    found = []
    for rollout, row in zip(rollouts, read_table(reader, BEGIN, ROWS).to_pylist(), strict=True):
        if row["counts"] is not None:
            kept = KeptTokens(_numbers(row["ids"]), _numbers(row["counts"]))
            assert len(kept.counts) == len(rollout.completion_ids), "the kept tokens are of another completion"
            assert kept.counts.min() >= 0 and int(kept.counts.sum()) == len(kept.ids), "their number doesn't fit"
            rollout = dataclasses.replace(rollout, kept=kept)
        found.append(rollout)
    return tuple(found)


def _bytes(numbers: torch.Tensor) -> bytes:
    return bytes(numbers.numpy().tobytes())


def _numbers(content: bytes) -> torch.Tensor:
    return torch.tensor(np.frombuffer(content, dtype=np.int32))
