"""Groups with a failed rollout: every reward function abstains from them, and they aren't trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...batch import Group
from ...rollout.stages import BeginScore, PendingRewards, Stages

FAILURE = "agent_failure"  # the rollout's column with the reason of its failure; empty: none


def agent_stages(sampler: Any) -> Callable[[Stages], Stages] | None:
    """Return a function for a source of sessions: failed groups abstain, and single answers may have rewards."""
    if not getattr(sampler.source, "may_fail", False):
        return None

    def change(stages: Stages) -> Stages:
        def begin_score(groups: Sequence[Group]) -> PendingRewards:
            if any(map(has_failed, groups)):
                return Abstaining(groups, stages.begin_score, len(sampler.scorer.rewards))
            return stages.begin_score(groups)

        return dataclasses.replace(stages, begin_score=begin_score, take_turns=sampler.scorer.take_turns)

    return change


def has_failed(group: Group) -> bool:
    return any(rollout.columns.get(FAILURE) for rollout in group.rollouts)


class Abstaining:
    """`PendingRewards` of some groups. Failed groups get NaN, and no reward function sees them.

    Args:
        begin: begins to score the groups that didn't fail.
        functions: R, the number of reward functions.
    """

    def __init__(self, groups: Sequence[Group], begin: BeginScore, functions: int) -> None:
        self._groups, self._functions = groups, functions
        whole = [group for group in groups if not has_failed(group)]
        self._pending = begin(whole) if whole else None

    def done(self) -> bool:
        return self._pending is None or self._pending.done()

    def cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    def result(self) -> torch.Tensor:
        rewards = torch.full((sum(len(group.rollouts) for group in self._groups), self._functions), torch.nan)
        if self._pending is not None:
            judged = [not has_failed(group) for group in self._groups for _ in group.rollouts]
            rewards[torch.tensor(judged)] = self._pending.result()
        return rewards
