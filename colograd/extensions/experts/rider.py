"""The experts that the engine's routers chose, as riders (data that travels with a rollout or a packed row)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from ...batch import PackedRow, Rollout
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider
from ...rollout.record_file import read_table, table_bytes

# Columns of a group's table, with one row per rollout. A null `prompt` means the last row's `prompt`.
ROWS = pa.schema(
    [pa.field("prompt", pa.binary()), pa.field("completion", pa.binary()), pa.field("shape", pa.list_(pa.int32()))]
)

UNKNOWN = -1  # Value in place of an expert's index, if the engine didn't record the expert.


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts(Rider):
    """Rider (per-token data of a rollout): the experts that the engine's routers chose, K per token in each of L
    layers. The experts of the last token are unknown, because the engine never read that token. The tensors are int8
    (int16 above 128 experts), so a token takes L * K bytes. All completions of a prompt share the prompt's tensor."""

    prompt: torch.Tensor  # Experts of the prompt's tokens, [P, L, K]. One tensor for all rollouts of a group.
    completion: torch.Tensor  # Experts of the completion's tokens, [C, L, K].

    MARK = b"\xff\xff\xff\xff"  # First bytes of every Arrow message, because old records have no special mark.

    @classmethod
    def of_turns(cls, parts: Sequence[tuple[Self | None, int]], prompt: int) -> Self | None:
        """Return the experts of a completion that several requests wrote. The experts of the last request cover all
        earlier tokens, because the last request's prompt contains them."""
        last = next((part for part, _ in reversed(parts) if part is not None), None)
        if last is None:
            return None
        whole = filled(torch.cat([last.prompt, last.completion]), prompt + sum(length for _, length in parts))
        return cls(whole[:prompt].clone(), whole[prompt:].clone())

    @classmethod
    def shared(cls, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Give all rollouts of a group one tensor of the prompt's experts, because a packed row has the prompt once."""
        first = rollouts[0].get(cls)
        if first is None:
            return rollouts
        found = []
        for rollout in rollouts:
            if rollout.input == rollouts[0].input:
                riders = (cls(first.prompt, r.completion) if isinstance(r, cls) else r for r in rollout.riders)
                rollout = dataclasses.replace(rollout, riders=tuple(riders))
            found.append(rollout)
        return tuple(found)

    @classmethod
    def of_row(cls, row: PackedRow) -> RowExperts:
        recorded = next(e for part in row.parts for r in part.rollouts if (e := r.get(cls)) is not None)
        pieces: list[torch.Tensor] = []

        def add(tokens: int, experts: torch.Tensor | None) -> None:
            new = recorded.prompt.new_full((tokens, *recorded.prompt.shape[1:]), UNKNOWN)
            pieces.append(new if experts is None else experts)

        for part in row.parts:
            first = part.rollouts[0].get(cls)
            add(len(part.rollouts[0].input), first and first.prompt)
            for rollout in part.rollouts:
                own = rollout.get(cls)
                add(len(rollout.completion_ids), own and own.completion)
        return RowExperts(to_device_async(torch.cat(pieces), row.device))

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        prompt: torch.Tensor | None = None
        rows: list[tuple[Any, Any, Any]] = []
        for experts in (rollout.get(cls) for rollout in rollouts):
            if experts is None:
                rows.append((None, None, None))
                continue
            is_known = prompt is not None and torch.equal(prompt, experts.prompt)
            prompt = experts.prompt
            parts = (None if is_known else experts.prompt, experts.completion)
            first, second = (None if part is None else part.numpy().tobytes() for part in parts)
            rows.append((first, second, [*experts.completion.shape[1:], experts.completion.element_size()]))
        return table_bytes(b"", rows, ROWS)

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        found: list[Rollout] = []
        prompt: torch.Tensor | None = None
        for rollout, row in zip(rollouts, read_table(reader, b"", ROWS).to_pylist(), strict=True):
            if row["shape"] is not None:
                if row["prompt"] is not None:
                    prompt = _numbers(row["prompt"], len(rollout.input), *row["shape"])
                assert prompt is not None and len(prompt) == len(rollout.input), "the prompt's experts are missing"
                own = cls(prompt, _numbers(row["completion"], len(rollout.completion_ids), *row["shape"]))
                rollout = rollout.carrying(own)
            found.append(rollout)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RowExperts(RowRider):
    experts: torch.Tensor  # Experts of a packed row's tokens, (T, L, K). `UNKNOWN` for tokens without recorded experts.

    OF_POLICY = True

    def part(self, tokens: slice, labels: torch.Tensor) -> RowExperts:
        return RowExperts(self.experts[tokens])

    def padded(self, tokens: int) -> RowExperts:
        return RowExperts(torch.nn.functional.pad(self.experts, (0, 0, 0, 0, 0, tokens), value=UNKNOWN))


def filled(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Copy the first ``tokens`` rows of experts into a new tensor [tokens, L, K], filled up with UNKNOWN."""
    rows = rows[:tokens]
    return torch.cat([rows, rows.new_full((tokens - len(rows), *rows.shape[1:]), UNKNOWN)])


def _numbers(content: bytes, tokens: int, layers: int, chosen: int, width: int) -> torch.Tensor:
    kind = {1: np.int8, 2: np.int16}[width]
    return torch.tensor(np.frombuffer(content, dtype=kind).reshape(tokens, layers, chosen))
