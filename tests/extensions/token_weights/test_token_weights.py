"""Weights of tokens that a reward function logs: from its call to the row, and back from the rollout log."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from colograd.batch import FinishReason, Group, Logged, ModelInput, Prompt, Rollout, ScoredGroup
from colograd.extensions.token_weights import TokenWeights
from colograd.policy.packing import pack
from colograd.reporting.metrics import PhaseTimes
from colograd.rewards import RewardError
from colograd.rewards.functions import with_logged_riders
from colograd.rollout.group_records import RewardedGroup, group_bytes, group_of
from colograd.rollout.rounds import PlainRound
from colograd.rollout.stages import Stages

LENGTHS, WEIGHTS = (2, 3), [[0.5, 2.0], None]
PROMPT = Prompt({"prompt": "so"}, ModelInput((1, 2)), 5)


def group() -> Group:
    rollouts = (
        Rollout(PROMPT.input, array("i", range(n)), torch.zeros(n), torch.ones(n) > 0, FinishReason.STOP, 0)
        for n in LENGTHS
    )
    return Group(PROMPT.example, tuple(rollouts), PROMPT.position)


def weighing(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
    log_extra("token_weights", WEIGHTS)
    return [1.0] * len(completions)


def weights_of(group: Group) -> list[list[float] | None]:
    riders = (rollout.get(TokenWeights) for rollout in group.rollouts)
    return [None if rider is None else rider.weights.tolist() for rider in riders]


def too_few(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
    log_extra("token_weights", [[1.0, 1.0], [1.0]])
    return [1.0] * len(completions)


@pytest.mark.parametrize("workers", [0, 1])
def test_logged_weights_multiply_the_tokens_advantages(scorer_of: Any, workers: int) -> None:
    scorer = scorer_of(weighing, workers=workers)
    rewards = scorer.submit([group()], [["a", "b"]]).result()
    weighted = with_logged_riders(group(), scorer.take_logged(5))
    assert weights_of(weighted) == WEIGHTS
    recorded = group_bytes(RewardedGroup(weighted, rewards, Logged({}, {})))
    again = group_of(recorded, PROMPT).group
    assert weights_of(again) == WEIGHTS
    sent = ScoredGroup(again, rewards, torch.tensor([1.0, -1.0])).for_training()
    (row,) = pack([sent], 100, False, torch.device("cpu"))
    assert row.advantages.tolist() == [0.5, 2.0, -1.0, -1.0, -1.0]


def test_logged_weights_reach_a_plain_round(scorer_of: Any) -> None:
    scorer = scorer_of(weighing)
    stages = Stages(
        generate=lambda prompts: iter([group()]),
        begin_score=lambda groups: scorer.submit(groups, [["a", "b"]]),
        compute_advantages=lambda group, rewards: torch.zeros(2),
        take_logged=scorer.take_logged,
    )
    ((scored,),) = (step.kept for step in PlainRound(PhaseTimes()).draw([[PROMPT]], stages))
    assert weights_of(scored.group) == WEIGHTS


def test_weights_of_another_length_are_refused(scorer_of: Any) -> None:
    with pytest.raises(RewardError, match=r"completion 1.*token_weights of \[1.0\]: give 3 finite numbers"):
        scorer_of(too_few).submit([group()], [["a", "b"]]).result()
