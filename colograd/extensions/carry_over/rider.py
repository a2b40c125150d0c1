"""Versions of the weights that sampled a completion's tokens, as data that travels with a rollout (`carry_over`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ...batch import PackedRow, Rollout
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Consecutive tokens of a completion that were sampled with the same weights."""

    length: int  # Number of tokens.
    version: int  # Optimizer step of the weights that sampled the tokens.


@dataclass(frozen=True, slots=True)
class Versions(Rider):
    """Rider (per-token data of a rollout) with the versions of the weights that sampled a completion's tokens. All
    tokens of a completion without this rider have the version `Rollout.policy_version`.

    Example: the round at step 7 sampled two tokens of a completion, and the round at step 8 two further tokens:

        completion_ids   22 23 | 24  2
        spans            VersionSpan(2, version=7), VersionSpan(2, version=8)
    """

    spans: tuple[VersionSpan, ...]

    KEY = "spans"

    def statistics(self, rollout: Rollout) -> tuple[dict[str, float], dict[str, float]]:
        ages = rollout.policy_version - versions_of(rollout)
        sums = {"carry_over/old_tokens": float((ages > 0).sum()), "carry_over/ages": float(ages.sum())}
        return sums, {"carry_over/max_age": float(ages.max())}

    @classmethod
    def of_row(cls, row: PackedRow) -> TokenAges:
        rollouts = [rollout for part in row.parts for rollout in part.rollouts]
        ages = torch.cat([rollout.policy_version - versions_of(rollout) for rollout in rollouts]).float()
        return TokenAges(to_device_async(ages, row.device))

    def to_json(self) -> Any:
        return [[span.length, span.version] for span in self.spans]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]], rollout: Rollout) -> Self:
        spans = tuple(VersionSpan(int(length), int(version)) for length, version in value)
        assert sum(span.length for span in spans) == len(rollout.completion_ids), "versions don't fit"
        return cls(spans)


@dataclass(frozen=True, slots=True, eq=False)
class TokenAges(RowRider):
    """Ages of a packed row's labels (target tokens): the step of a label's round minus the step of its sampler's
    weights."""

    ages: torch.Tensor  # Age of each label in optimizer steps, (N,) float32.

    def metrics(self, difference: torch.Tensor, scored: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        old = scored * (self.ages > 0)
        return {"carry_over/old_logp_difference": ((difference * old).sum(), old.sum())}


def versions_of(rollout: Rollout) -> torch.Tensor:
    """Return for each token of a completion the optimizer step of the weights that sampled it, [C] int64."""
    versions = rollout.get(Versions)
    if versions is None:
        return torch.full((len(rollout.completion_ids),), rollout.policy_version)
    return torch.cat([torch.full((span.length,), span.version) for span in versions.spans])
