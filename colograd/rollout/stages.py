"""What stands between prompts and scored groups: rollout sources, rewards on their way, and the stages as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import Group, Prompt, ScoredGroup
from ..engine.sampling import Sampling


class RolloutSource(Protocol):
    """Writes the groups of some prompts. `Engine`, `Conversations` and `CustomRollouts` are rollout sources."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Yield each prompt's `Group` of ``sampling.n`` rollouts when its last one ends, in any order.

        A generator that is closed early drops what it has begun.

        Args:
            version: the optimizer step whose weights are to sample; it goes into each rollout.
            seed: the run's. With ``purpose`` and a prompt's position it says what is drawn for that prompt.
            purpose: `train`, `eval` or another word; each draws differently.
        """


class PendingRewards(Protocol):
    """Rewards on their way. `rewards.Scoring` and `rewards.Ready` are such."""

    def done(self) -> bool:
        """Whether `result` wouldn't have to wait."""

    def cancel(self) -> object:
        """Nobody asks for the result."""

    def result(self) -> torch.Tensor:
        """Wait for the rewards, [completions, R] float32, NaN where a function abstained."""


@dataclass(frozen=True, slots=True)
class Stages:
    """How a run, or its evaluation, gets from prompts to scored groups."""

    generate: Callable[[Sequence[Prompt]], Iterable[Group]]  # one group per prompt, in any order
    begin_score: Callable[[Sequence[Group]], PendingRewards]  # of all of the groups together
    judge: Callable[[Group, torch.Tensor], ScoredGroup]  # a group and its rewards [G, R]
