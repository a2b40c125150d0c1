"""KL in the reward: the advantages against values worked out from verl's formula, and settings that exclude it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from row_cases import make_groups

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup, StepBatch
from colograd.extensions.reward_kl.penalty import ESTIMATORS, penalty_of
from colograd.losses.advantages import AdvantageEstimator
from colograd.losses.objective import Objective
from colograd.policy.packing import collate, places, plan_rows

CPU = torch.device("cpu")
BETA = 0.3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("k1", [0.5, -0.5, -5.0]),
        ("k2", [0.125, 0.125, 12.5]),
        ("k3", [0.106531, 0.148721, 10.0]),  # e^-0.5 - 0.5, e^0.5 - 1.5; e^5 - 6 = 142 is above the bound
    ],
)
def test_estimators_have_verls_values(name: str, values: list[float]) -> None:
    """The three estimators for log pi - log reference of 0.5, -0.5 and -5 nats."""
    assert ESTIMATORS[name](torch.tensor([0.5, -0.5, -5.0])).tolist() == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(("name", "advantage"), [("k1", 0.325), ("k2", 0.47625), ("k3", 0.479030)])
def test_penalty_is_summed_before_the_baseline(tmp_path: Path, name: str, advantage: float) -> None:
    """Rewards of 1 and 0, less 0.5 times the sum over log-ratios of (0.2, 0.4) behind a tool's token, and of (-0.1).

    k1: 1 - 0.3 and 0.05. k2: 1 - 0.05 and -0.0025. k3: 1 - 0.044525 and -0.002585. Half of the difference remains.
    """
    config = tiny.config(tmp_path, kl_in_reward=0.5, kl_in_reward_estimator=name, scale_rewards="none")
    estimator = AdvantageEstimator.of(config, [1.0])
    rollouts = (
        Rollout(
            (3, 4), (5, 6, 7), torch.tensor([-1.0, -0.5, -0.6]), torch.tensor([False, True, True]),
            FinishReason.STOP, 0,
        ),
        Rollout((3, 4), (5,), torch.tensor([-1.0]), torch.tensor([True]), FinishReason.STOP, 0),
    )  # fmt: skip
    rewards = torch.tensor([[1.0], [0.0]])
    group = ScoredGroup(Group({}, rollouts, 0), rewards, estimator.of_group(rewards))
    (row,) = plan_rows([group], 10_000, False, CPU)
    reference = dict(zip(group.group.rollout_ids, ([-9.0, -0.7, -1.0], [-0.9]), strict=True))
    logprobs = torch.tensor([each for identity, _ in places(row) for each in reference[identity]])
    term = penalty_of(config, None)
    assert term is not None
    row = row.with_scores("ref_logprobs", logprobs)
    (scored_group,) = term.with_scores(StepBatch((row,), 1, 1, {}, (group,)), estimator).groups
    assert scored_group.advantages.tolist() == pytest.approx([advantage, -advantage], abs=1e-6)


def scored(estimator: AdvantageEstimator) -> list[ScoredGroup]:
    """Groups with drawn rewards and log-probabilities; the first token of each rollout is a tool's."""
    draw, found = torch.Generator().manual_seed(0), []
    for group in make_groups():
        rollouts = []
        for rollout in group.group.rollouts:
            count = len(rollout.completion_ids)
            sampled = torch.ones(count, dtype=torch.bool)
            sampled[0] = count == 1
            logprobs = -torch.rand(count, generator=draw)
            rollouts.append(dataclasses.replace(rollout, sampler_logprobs=logprobs, sampled=sampled))
        rewards = torch.rand(len(rollouts), 2, generator=draw)
        inner = dataclasses.replace(group.group, rollouts=tuple(rollouts))
        found.append(ScoredGroup(inner, rewards, estimator.of_group(rewards)))
    return found


@pytest.mark.parametrize("budget", [30, 10_000])
def test_the_group_sees_penalised_rewards(tmp_path: Path, budget: int) -> None:
    config = tiny.config(tmp_path, kl_in_reward=BETA, reward_weights=[1.0, 0.5])
    estimator = AdvantageEstimator.of(config, [1.0, 0.5])
    groups, draw = scored(estimator), torch.Generator().manual_seed(1)
    rows = [
        row.with_scores("ref_logprobs", -torch.rand(sum(map(len, rollouts)), generator=draw))
        for row in plan_rows(groups, budget, False, CPU)
        if (rollouts := [rollout.completion_ids for part in row.parts for rollout in part.rollouts])
    ]
    reference = {identity: row.scores["ref_logprobs"][at] for row in rows for identity, at in places(row)}
    term = penalty_of(config, None)
    assert term is not None
    step = term.with_scores(StepBatch(tuple(rows), 1, 1, {}, tuple(groups)), estimator)
    expected = {}
    for group in groups:
        sums = []
        for identity, rollout in zip(group.group.rollout_ids, group.group.rollouts, strict=True):
            kld = (rollout.sampler_logprobs - reference[identity]) * rollout.sampled
            sums.append(BETA * kld.sum())
        totals = group.rewards @ torch.tensor([1.0, 0.5]) - torch.stack(sums)
        advantages = (totals - totals.mean()) / (totals.std() + 1e-4)
        expected |= dict(zip(group.group.rollout_ids, advantages, strict=True))
    for group in step.groups:
        for identity, advantage in zip(group.group.rollout_ids, group.advantages, strict=True):
            torch.testing.assert_close(advantage, expected[identity], rtol=1e-4, atol=1e-5)
    for row in step.rows:
        batch = collate(row)
        for identity, at in places(row):
            torch.testing.assert_close(
                batch.advantages[at], expected[identity].expand(at.stop - at.start), rtol=1e-4, atol=1e-5
            )


def test_a_run_with_it_has_a_reference(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, kl_in_reward=BETA)
    assert Objective.from_config(config).with_terms(config, None).needs == ("ref_logprobs",)
    assert penalty_of(tiny.config(tmp_path), None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kl_in_reward": -1.0}, "kl_in_reward is -1, but must be at least 0"),
        ({"kl_in_reward": 0.1, "kl_in_reward_estimator": "k4"}, "'k4', but must be one of k1, k2, k3"),
        ({"kl_in_reward": 0.1, "scale_rewards": "batch"}, "Set scale_rewards to group, mean or none"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        penalty_of(tiny.config(tmp_path, **given), None)


def test_other_advantages_are_refused(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, kl_in_reward=BETA)
    estimator = AdvantageEstimator.of(config, [1.0, 1.0])
    groups = [dataclasses.replace(group, advantages=group.advantages + 1) for group in scored(estimator)]
    rows = [
        row.with_scores("ref_logprobs", torch.zeros(len(collate(row).labels)))
        for row in plan_rows(groups, 10_000, False, CPU)
    ]
    term = penalty_of(config, None)
    assert term is not None
    with pytest.raises(ValueError, match="but the advantages weren't"):
        term.with_scores(StepBatch(tuple(rows), 1, 1, {}, tuple(groups)), estimator)
