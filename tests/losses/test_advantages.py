"""Advantages equal the results of TRL's own code in every mode, also with abstentions and groups without signal."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from needs import case

from colograd.batch import FinishReason, Group, Logged, Prompt, Rollout, SampledStep, ScoredGroup
from colograd.losses.advantages import (
    AdvantageEstimator,
    group_advantages,
    group_std,
    scale_over_steps,
    step_std,
)
from colograd.policy.packing import PackingRules, collate, has_signal, pack_step
from colograd.reporting.metrics import PhaseTimes
from colograd.rewards import Ready, weighted_sum
from colograd.rollout.rounds import PlainRound
from colograd.rollout.stages import Stages

NAN = math.nan
GROUP = 6  # completions
WEIGHTS = {1: (1.0,), 3: (1.0, 0.5, -2.0)}


# -- the installed TRL, with generation and rewards given


def trl_advantages(rewards: torch.Tensor, weights: tuple[float, ...], **settings: Any) -> torch.Tensor:
    """[B, R] rewards of a batch -> [B] advantages, by the installed TRL's `_generate_and_score_completions`.

    ``baseline="leave_one_out"`` is its RLOOTrainer; all else its GRPOTrainer. Nothing else of a trainer is made: the
    completions are one token each, and log-probabilities are stubs.
    """
    trl = pytest.importorskip("trl")
    cls = trl.RLOOTrainer if settings.pop("baseline", "mean") == "leave_one_out" else trl.GRPOTrainer
    bare = cls.__new__(cls)
    many = len(rewards)
    completion = [[{"role": "assistant", "content": ""}]] * many
    generated = {
        trl.GRPOTrainer: ([[1]] * many, [[2]] * many, None, completion, None, {}, None, None),
        trl.RLOOTrainer: ([[1]] * many, [[2]] * many, completion),
    }
    bare._generate = lambda prompts: generated[cls]
    bare._calculate_rewards = lambda *given: rewards.clone()
    bare._get_per_token_logps_and_entropies = lambda *args, **kwargs: (torch.zeros(many, 1), None, None)
    names = [f"reward {index}" for index in range(len(weights))]
    state = {
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"), process_index=0, gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(
            per_device_train_batch_size=many,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "num_generations": GROUP,
        "reward_weights": torch.tensor(weights),
        "reward_funcs": names,
        "reward_func_names": names,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "beta": 0.0,
        "num_iterations": 1,
        "reward_clip_range": None,
        **dict.fromkeys(("environment_factories", "environments", "tools", "pad_to_multiple_of"), None),
        **dict.fromkeys(("mask_truncated_completions", "use_vllm", "log_multimodal", "_is_vlm"), False),
        **settings,
    }
    vars(bare).update(state)
    output = cls._generate_and_score_completions(bare, [{"prompt": ""}] * many)
    return output["advantages"]


def ours(rewards: torch.Tensor, estimator: AdvantageEstimator) -> torch.Tensor:
    """[B, R] rewards -> [B] advantages by both stages of a step: per group, then over the step."""
    groups = rewards.split(GROUP)
    advantages = torch.cat([estimator.of_group(group) for group in groups])
    scores = estimator.step_scores
    return advantages / step_std([scores(group) for group in groups]) if scores else advantages


def abstaining(rewards: torch.Tensor, how: str) -> torch.Tensor:
    """Rewards of 4 groups with abstentions (NaN): single rewards (`some`), all rewards of a completion (`nobody`), all
    but one completion of a group (`alone`), whole groups (`groups`), or one function (`function`)."""
    given = rewards.clone()
    if how == "some":
        given[torch.rand(given.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = NAN
    elif how == "nobody":
        given[[0, 7, 8, 20]] = NAN
    elif how == "alone":
        given[1:GROUP] = NAN
    elif how == "groups":
        given[GROUP : 3 * GROUP] = NAN
    elif how == "function":
        given[:, -1] = NAN
    return given


MODES = [
    *({"scale_rewards": s, "multi_objective_aggregation": "sum_then_normalize"} for s in ("group", "batch", "none")),
    *({"scale_rewards": s, "multi_objective_aggregation": "normalize_then_sum"} for s in ("group", "batch", "none")),
    {"baseline": "leave_one_out", "normalize_advantages": False},
]


def test_advantages_equal_trl_s_in_every_mode_with_and_without_abstentions(capsys: pytest.CaptureFixture[str]) -> None:
    combinations = 0
    for mode, functions, how in itertools.product(
        MODES, WEIGHTS, ("none", "some", "nobody", "alone", "groups", "function")
    ):
        weights = WEIGHTS[functions]
        estimator = AdvantageEstimator(
            mode.get("scale_rewards", "none"),
            mode.get("multi_objective_aggregation", "sum_then_normalize"),
            mode.get("baseline", "mean"),
            weights,
        )
        for seed, spread in enumerate((1.0, 0.1, 5.0)):
            drawn = spread * torch.randn(4 * GROUP, functions, generator=torch.Generator().manual_seed(seed))
            if seed == 2:  # few values, as most rewards have, and a group without a difference
                drawn = drawn.round()
                drawn[:GROUP] = 1.0
            rewards = abstaining(drawn, how)
            found, expected = ours(rewards, estimator), trl_advantages(rewards, weights, **dict(mode))
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5), (mode, how, seed, found, expected)
            combinations += 1
    with capsys.disabled():
        print(f"\n{combinations} combinations of mode, reward functions, abstentions and rewards agree with TRL")


def test_leave_one_out_compares_with_the_others() -> None:
    rewards = torch.tensor([1.0, 0.0, NAN, 0.5])
    expected = torch.tensor([1.0 - 0.25, 0.0 - 0.75, 0.0, 0.5 - 0.5])
    torch.testing.assert_close(group_advantages(rewards, "none", "leave_one_out"), expected)


def test_scaling_divides_by_the_sample_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    deviation = math.sqrt(4 * 0.25 / 3)  # n - 1
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5])
    torch.testing.assert_close(group_advantages(rewards, "none"), expected)
    torch.testing.assert_close(group_advantages(rewards, "group"), expected / (deviation + 1e-4))


def test_mean_scale_is_the_likelihood_gradient() -> None:
    """MaxRL, arXiv 2602.02710: if k of n completions pass, the advantage is 1/k for a passing one, less 1/n for all
    (times n, because a group's mean is taken). Without a positive mean the scale is 1."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    expected = 5 * (rewards / 2 - 1 / 5)
    torch.testing.assert_close(group_advantages(rewards, "mean"), expected)
    penalties = -rewards
    torch.testing.assert_close(group_advantages(penalties, "mean"), group_advantages(penalties, "none"))


def test_centred_batch_has_unit_deviation() -> None:
    """REINFORCE++-baseline, arXiv 2501.03262: rewards less their group's mean, normalised over the batch."""
    drawn = torch.randn(4, GROUP, generator=torch.Generator().manual_seed(0)) + 100 * torch.arange(4.0)[:, None]
    found = ours(drawn.view(-1, 1), AdvantageEstimator("batch_centered", "sum_then_normalize", "mean", (1.0,)))
    less = (drawn - drawn.mean(dim=1, keepdim=True)).view(-1)
    torch.testing.assert_close(found, (less - less.mean()) / (less.std() + 1e-4), rtol=1e-4, atol=1e-5)


ESTIMATORS = [
    AdvantageEstimator(scale, "sum_then_normalize", baseline, (1.0,))
    for scale in ("group", "batch", "batch_centered", "mean", "none")
    for baseline in ("mean", "leave_one_out")
] + [AdvantageEstimator("group", "normalize_then_sum", "mean", (1.0,))]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_abstention_gets_zero_and_moves_nobody(estimator: AdvantageEstimator) -> None:
    judged = torch.tensor([1.0, 0.0, 0.5])
    advantages = estimator.of_group(torch.tensor([1.0, NAN, 0.0, 0.5, NAN])[:, None])
    assert advantages[[1, 4]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(advantages[[0, 2, 3]], estimator.of_group(judged[:, None]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [NAN] * 4, [0.5, NAN, NAN, NAN], [0.25, 0.25, NAN, 0.25]])
def test_no_difference_is_no_advantage(rewards: list[float], estimator: AdvantageEstimator) -> None:
    assert estimator.of_group(torch.tensor(rewards)[:, None]).tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e3 + 0.1])
@pytest.mark.parametrize("size", [3, 7, 8, 12])
def test_equal_rewards_give_exactly_zero_whatever_their_value(
    value: float, size: int, estimator: AdvantageEstimator
) -> None:
    """A group has no signal exactly if its advantages are zero, so the rounding of the mean must not change them."""
    assert not estimator.of_group(torch.full((size, 1), value)).any()


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ([[0.6, 0.1], [0.7, 0.0]], (1.0, 1.0)),
        ([[0.1, 0.2, NAN], [0.3, NAN, NAN], [0.0, 0.1, 0.2]], (1.0, 1.0, 1.0)),
        ([[3.0, 1.0], [1.0, 1.6]], (0.3, 1.0)),
        ([[1000.1, -1000.0], [0.1, 0.0]], (1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("estimator", ESTIMATORS[:-1])
def test_equal_totals_give_exactly_no_advantage(
    rewards: list[list[float]], weights: tuple[float, ...], estimator: AdvantageEstimator
) -> None:
    """0.6 + 0.1 equals 0.7, but not in float32. A group with such totals isn't trained."""
    given = torch.tensor(rewards * 2)
    estimator = dataclasses.replace(estimator, weights=weights)
    assert not estimator.of_group(given).any()
    assert weighted_sum(given, weights).unique().numel() == 1
    given[0, 0] += 1e-3
    assert estimator.of_group(given).any()


def test_normalised_rewards_that_cancel_are_no_signal() -> None:
    """Two opposite functions cancel. Only the rounding of the rewards and their means is left."""
    estimator = AdvantageEstimator("group", "normalize_then_sum", "mean", (1.0, 1.0))
    for liked in (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.1, 0.2, 0.7])):
        assert not estimator.of_group(torch.stack([liked, 1 - liked], 1)).any()


def test_the_deviation_of_fewer_than_two_is_zero() -> None:
    assert group_std(torch.tensor([3.0, NAN])) == 0 == group_std(torch.tensor([NAN]))
    assert group_std(torch.tensor([1.0, 3.0, NAN])) == pytest.approx(math.sqrt(2))
    assert step_std([]) == step_std([torch.tensor([NAN])]) == 1e-4


def test_the_deviation_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = torch.tensor([0.25, 1.0, NAN]), [0.5, 4.0]
    monkeypatch.setattr("colograd.losses.advantages.gather", lambda own: [theirs, own])
    everything = torch.tensor([*theirs, *mine.tolist()])
    assert step_std([mine[:2], mine[2:]]) == pytest.approx(float(group_std(everything)) + 1e-4)


# -- over the step


def scored(position: int, rewards: torch.Tensor, advantages: torch.Tensor) -> ScoredGroup:
    rollouts = tuple(
        Rollout((1,), (2, 3), torch.zeros(2), torch.ones(2, dtype=torch.bool), FinishReason.STOP, 0)
        for _ in range(len(rewards))
    )
    return ScoredGroup(Group({"prompt": ""}, rollouts, position), rewards, advantages, Logged({}, {}))


class Made:
    """Two groups a step. A group's position gives its rewards."""

    REWARDS = {0: [1.0, 3.0], 1: [2.0, 2.0], 2: [5.0, NAN], 3: [0.0, 8.0], 4: [1.0, 1.5], 5: [4.0, 0.0]}

    def __init__(self, estimator: AdvantageEstimator, per_token: bool) -> None:
        self.estimator, self.per_token = estimator, per_token

    def generate(self, prompts: Any) -> Any:
        for prompt in prompts:
            yield scored(prompt.position, torch.zeros(2, 1), torch.zeros(2)).group

    def begin_score(self, groups: Any) -> Any:
        return Ready(torch.cat([torch.tensor(self.REWARDS[group.position])[:, None] for group in groups]))

    def more_prompts(self, drawn: int, count: int) -> list[Prompt]:
        return [Prompt({}, (1,), 4 + drawn + index) for index in range(min(count, 2 - drawn))]

    def judge(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        advantages = self.estimator.of_group(rewards)
        return advantages.repeat_interleave(2) if self.per_token else advantages

    def draw(self, max_rounds: int = 0) -> list[SampledStep]:
        stages = Stages(self.generate, self.begin_score, self.judge)
        plain = PlainRound(PhaseTimes())
        own = plain
        if max_rounds:
            from colograd.extensions.dynamic_sampling.rounds import DynamicRound

            own = DynamicRound(PhaseTimes(), False, max_rounds, self.more_prompts)
        drawn = own.draw(STEPS, stages)
        return scale_over_steps(drawn, self.estimator)


RULES = PackingRules(
    max_tokens=100,
    mask_truncated=False,
    skip_without_signal=True,
    share_prompts=True,
    balance_ranks=False,
    equal_counts=False,
    pair_cost=0.0,
    device=torch.device("cpu"),
)
STEPS = [[Prompt({}, (1,), 0), Prompt({}, (1,), 1)], [Prompt({}, (1,), 2), Prompt({}, (1,), 3)]]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("max_rounds", [0, case(3, "dynamic_sampling")])
def test_batch_is_the_trained_step(max_rounds: int, per_token: bool) -> None:
    stages = Made(AdvantageEstimator("batch", "sum_then_normalize", "mean", (1.0,)), per_token)
    drawn = stages.draw(max_rounds)
    # Groups 1 and 2 have no difference: they count in the step's deviation unless they are replaced.
    of_steps = [(0, 3), (4, 5)] if max_rounds else [(0, 1), (2, 3)]
    for step, positions in zip(drawn, of_steps, strict=True):
        rewards = [torch.tensor(stages.REWARDS[position]) for position in positions]
        std = float(torch.cat(rewards)[~torch.cat(rewards).isnan()].std()) + 1e-4
        differing = [r - r.mean() for r in rewards if not r.isnan().any() and r[0] != r[1]]
        expected = torch.cat(differing).repeat_interleave(2) / std
        row = collate(*pack_step([*filter(has_signal, step.kept)], RULES))
        torch.testing.assert_close(row.advantages.sort().values, expected.sort().values)
        for group in (g for part in drawn for g in part.sampled if g.group.position in positions and has_signal(g)):
            repeats = 1 if per_token else 2
            assert group.advantages.repeat_interleave(repeats).abs().max() in row.advantages.abs()


def test_without_scaling_over_the_step_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    for scaling in ("group", "none"):
        estimator = AdvantageEstimator(scaling, "sum_then_normalize", "mean", (1.0,))
        assert estimator.step_scores is None
        monkeypatch.setattr("colograd.losses.advantages.step_std", None)
        Made(estimator, False).draw()
