"""Weights of a completion's tokens. In the loss each token's advantage is multiplied by the token's weight.

A reward function logs the weights if it knows which tokens matter, e.g. the first wrong step of a proof:

    log_extra("token_weights", [[1.0, 1.0, 0.2, 0.2], None])     one list per completion; None means weights of 1
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ...batch import MicroBatch, PackedRow, Rollout
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider


@dataclass(frozen=True, slots=True)
class TokenWeights(Rider):
    """The weights of a rollout's completion tokens. Without this rider (per-token data) all weights are 1."""

    weights: tuple[float, ...]  # [C], one finite weight per completion token

    KEY = COLUMN = "token_weights"

    @classmethod
    def of_row(cls, row: PackedRow) -> RowWeights:
        rollouts = [rollout for part in row.parts for rollout in part.rollouts]
        own = [(len(rollout.completion_ids), rollout.get(cls)) for rollout in rollouts]
        weights = [torch.ones(tokens) if rider is None else torch.tensor(rider.weights) for tokens, rider in own]
        return RowWeights(to_device_async(torch.cat(weights), row.device))

    def to_json(self) -> Any:
        return list(self.weights)

    @classmethod
    def from_json(cls, value: Any, rollout: Rollout) -> Self:
        count = len(rollout.completion_ids)
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count
        if not is_list or not all(isinstance(each, numbers.Real) and math.isfinite(each) for each in value):
            raise ValueError(f"{value!r:.60}: give {count} finite numbers, one per completion token, or None.")
        return cls(tuple(map(float, value)))


@dataclass(frozen=True, slots=True, eq=False)
class RowWeights(RowRider):
    """The token weights of a packed row, one per label. They multiply the row's advantages."""

    weights: torch.Tensor  # float32 [N], one weight per label

    def applied(self, row: MicroBatch) -> MicroBatch:
        return dataclasses.replace(row, advantages=row.advantages * self.weights)
