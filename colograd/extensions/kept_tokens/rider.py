"""Records of the tokens that truncated sampling (top_k, top_p, min_p) kept, and masks of all other tokens' logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from ...batch import PackedRow, Rollout
from ...config import GRPOConfig
from ...policy.logprobs import Compute, ForwardStep, Pass, install
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider
from ...rollout.record_file import read_table, table_bytes

# Table with a row per rollout: bytes of the int32 tensors of `KeptTokens`, or null.
ROWS = pa.schema([pa.field("ids", pa.binary()), pa.field("counts", pa.binary())])


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens(Rider, RowRider):
    """The tokens that top-k, top-p and min-p kept for each sampled token. A model's softmax is over these tokens.

    Example of a completion of four tokens. Token 23 was sampled from the whole vocabulary:

        completion_ids   22          23  24        2
        ids              22 27 29        24 12     2
        counts           3           0   2         1
    """

    ids: torch.Tensor  # Ids of the kept tokens, [sum of counts] int32, in host memory.
    counts: torch.Tensor  # Number of kept tokens for each of N sampled tokens, [N] int32. 0: the whole vocabulary.

    MARK = b"KEPT SET"

    @classmethod
    def of_turns(cls, parts: Sequence[tuple[Self | None, int]], prompt: int = 0) -> Self | None:
        if all(part is None for part, _ in parts):
            return None
        none = torch.empty(0, dtype=torch.int32)
        counts = [none.new_zeros(length) if part is None else part.counts for part, length in parts]
        return cls(torch.cat([none if part is None else part.ids for part, _ in parts]), torch.cat(counts))

    @classmethod
    def of_row(cls, row: PackedRow) -> Self | None:
        return cls.of_turns([(r.get(cls), len(r.completion_ids)) for part in row.parts for r in part.rollouts])

    def part(self, tokens: slice, labels: torch.Tensor) -> KeptTokens:
        starts, counts = self.counts.cumsum(0) - self.counts, self.counts[labels]
        shifts = starts[labels] - (counts.cumsum(0) - counts)
        index = torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts.long())
        return KeptTokens(self.ids[index], counts)

    @classmethod
    def table(cls, rollouts: Sequence[Rollout]) -> bytes:
        rows: list[tuple[bytes | None, bytes | None]] = []
        for part in (rollout.get(cls) for rollout in rollouts):
            rows.append((None, None) if part is None else (part.ids.numpy().tobytes(), part.counts.numpy().tobytes()))
        return table_bytes(cls.MARK, rows, ROWS)

    @classmethod
    def with_table(cls, reader: Any, rollouts: Sequence[Rollout], encoder: Any) -> Sequence[Rollout]:
        result = []
        for rollout, row in zip(rollouts, read_table(reader, cls.MARK, ROWS).to_pylist(), strict=True):
            if row["counts"] is not None:
                rider = cls(*(torch.tensor(np.frombuffer(row[name], np.int32)) for name in ("ids", "counts")))
                assert len(rider.counts) == len(rollout.completion_ids), "the kept tokens are of another completion"
                assert rider.counts.min() >= 0 and int(rider.counts.sum()) == len(rider.ids), "their number doesn't fit"
                rollout = rollout.carrying(rider)
            result.append(rollout)
        return result


class Candidates:
    """Kept tokens of N labels (sampled tokens). From these, `hidden` computes masks for tiles of logits.

    Args:
        first: token id of the first vocabulary entry of this rank's output layer.
    """

    def __init__(self, kept: KeptTokens, device: torch.device, first: int = 0) -> None:
        counts = kept.counts.long()
        self.ends = [0, *counts.cumsum(0).tolist()]  # In host memory, so that slicing doesn't wait for the GPU.
        self.ids = to_device_async(kept.ids.long() - first, device)
        self.labels = to_device_async(torch.arange(len(counts)).repeat_interleave(counts), device)
        self.all = to_device_async(counts == 0, device)

    def hidden(self, row: slice, vocabulary: slice) -> torch.Tensor:
        """Return the mask (n, c) of a tile of n labels and c vocabulary entries. True: the entry wasn't kept."""
        here = slice(self.ends[row.start], self.ends[row.stop])
        shape = row.stop - row.start, vocabulary.stop - vocabulary.start
        columns = self.ids[here] - vocabulary.start
        inside = (columns >= 0) & (columns < shape[1])
        places = ((self.labels[here] - row.start) * shape[1] + columns).where(inside, shape[0] * shape[1])
        hidden = torch.ones(shape[0] * shape[1] + 1, dtype=torch.bool, device=self.ids.device)
        hidden[places] = False  # Kept tokens of other tiles are written to the last entry, which is dropped.
        return hidden[:-1].view(shape) & ~self.all[row, None]


class KeptStep(ForwardStep):
    of_rows = True

    def around(self, inner: Compute, row: Pass) -> tuple[torch.Tensor, ...]:
        if (kept := row.batch.get(KeptTokens)) is not None:
            part = getattr(row.model.get_output_embeddings(), "vocabulary", None)
            first = 0 if part is None else part.start
            row.candidates = Candidates(kept, row.batch.input_ids.device, first)
        return inner(row)


def set_up(model: Any, config: GRPOConfig) -> None:
    if config.replays_truncation:
        install(model, KeptStep())
