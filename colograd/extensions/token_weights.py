"""Weights of a completion's tokens: each token's advantage is multiplied by the token's weight.

A reward function logs the weights, one list per completion; None means weights of 1:

    log_extra("token_weights", [[1.0, 1.0, 0.2, 0.2], None])
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..batch import MicroBatch, PackedRow, Rollout
from ..policy.sending import to_device_async
from ..riders import Rider, RowRider


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights(Rider, RowRider):
    weights: torch.Tensor  # Float32, one finite weight per completion token [C], or per label of a packed row [N].

    KEY = COLUMN = "token_weights"

    @classmethod
    def of_row(cls, row: PackedRow) -> Self:
        own = [(r.get(cls), len(r.completion_ids)) for part in row.parts for r in part.rollouts]
        weights = torch.cat([torch.ones(tokens) if rider is None else rider.weights for rider, tokens in own])
        return cls(to_device_async(weights, row.device))

    def applied(self, row: MicroBatch) -> MicroBatch:
        return dataclasses.replace(row, advantages=row.advantages * self.weights)

    def to_json(self) -> Any:
        return self.weights.tolist()

    @classmethod
    def from_json(cls, value: Any, rollout: Rollout) -> Self:
        count = len(rollout.completion_ids)
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count
        if not is_list or not all(isinstance(each, numbers.Real) and math.isfinite(each) for each in value):
            raise ValueError(f"{value!r:.60}: give {count} finite numbers, one per completion token, or None.")
        return cls(torch.tensor([float(each) for each in value]))


HOOKS: dict[str, str | tuple[str, ...]] = {"riders": ":TokenWeights"}
