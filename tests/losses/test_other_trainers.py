"""Objectives and advantages against other sources than TRL: values that other trainers' code returned, and sums over
everything that can be sampled.

`RECORDED` was computed once with verl 1dda039b9 (`verl/trainer/ppo/core_algos.py`, aggregated over the step) and, for
VESPO, its authors' code (FloyedShen/VESPO aa1f3045), on the eight tokens below. OpenRLHF, NeMo-RL, slime and SkyRL have
the same formulas where they have them. verl adds 1e-8 to some denominators.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import pytest
import torch
from loss_cases import gradients, make_objective, make_step

from colograd.batch import FinishReason, Group, MicroBatch, Rollout, ScoredGroup, StepBatch
from colograd.config import GRPOConfig
from colograd.losses.advantages import AdvantageEstimator, step_std
from colograd.losses.objective import Objective, SamplerCorrection
from colograd.losses.token_losses import LOSSES
from colograd.policy.packing import pack

CPU = torch.device("cpu")
# Four completions: the first one's third token is a tool's, the last one is truncated and left out of the loss.
LENGTHS = (4, 2, 1, 1)
LOGPROBS = [-1.2, -0.7, -2.0, -0.3, -0.9, -1.6, -0.4, -0.8]
LOG_RATIOS = [0.3, -0.4, 5.0, 0.1, 0.5, -0.6, -0.05, 0.7]
TO_REFERENCE = [0.2, -0.3, 9.0, 0.4, -0.5, 0.1, 0.6, 0.9]
OF_COMPLETIONS = [0.8, -1.1, 0.5, 2.0]
OF_TURNS = [0.8, 0.8, 0.0, -0.6, -1.1, 0.9, 0.5, 2.0]
NONE = [0.0] * 4

# Settings, advantages, the loss, and its gradient by each token's log-probability.
RECORDED: list[tuple[dict[str, Any], list[float], list[float]]] = [
    ({"loss_type": "dapo"}, OF_COMPLETIONS, [-0.037736, 0.0, -0.089376, 0, -0.147356, 0.302266, 0.0, -0.079269, 0]),
    ({"loss_type": "bnpo"}, OF_TURNS, [-0.008851, 0, -0.089376, 0, 0.110517, 0.302266, -0.082322, -0.079269, 0]),
    ({"loss_type": "dapo", "delta": 1.4}, OF_COMPLETIONS, [-0.083335, 0, -0.089376, 0, -0.147356, 0, 0, -0.079269, 0]),
    ({"loss_type": "grpo"}, OF_COMPLETIONS, [0.014096, 0, -0.044688, 0, -0.073678, 0.226699, 0, -0.118904, 0]),
    (
        {"loss_type": "dr_grpo", "max_completion_length": 9},
        OF_COMPLETIONS,
        [-0.006289, 0, -0.014896, 0, -0.024559, 0.050378, 0, -0.013212, 0],
    ),
    ({"loss_type": "luspo"}, OF_COMPLETIONS, [-0.056604, 0, -0.134064, 0, -0.221034, 0.453398, 0, -0.118904, 0]),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        OF_COMPLETIONS,
        [-0.057316, -0.066667, -0.066667, 0, -0.066667, 0.130794, 0.130794, -0.118904, 0],
    ),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        OF_TURNS,
        [-0.178456, -0.066667, -0.066667, 0, 0.05, 0.130794, -0.107013, -0.118904, 0],
    ),
    (
        {"loss_type": "sapo"},
        OF_COMPLETIONS,
        [-0.103408, -0.087292, -0.043495, 0, -0.073475, 0.202311, 0.071381, -0.118833, 0],
    ),
    (
        {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4},
        OF_COMPLETIONS,
        [-0.029804, -0.066667, -0.066667, 0, -0.066667, 0.14455, 0, -0.118904, 0],
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 1.28},
        OF_COMPLETIONS,
        [-0.028907, -0.170667, -0.089376, 0, -0.147356, 0.234667, 0.100615, -0.079269, 0],
    ),
    (
        {"loss_type": "dppo", "epsilon": 0.1, "epsilon_high": 0.1},
        OF_COMPLETIONS,
        [0.082416, -0.179981, -0.089376, 0, -0.147356, 0.302266, 0, -0.079269, 0],
    ),
    (
        {"loss_type": "vespo"},
        OF_COMPLETIONS,
        [-0.082477, -0.133333, -0.133333, 0, -0.133333, 0.16429, 0.16429, -0.087283, 0],
    ),
    # k3; and on-policy, where k3 times the ratio has the gradient of k2: verl's `k3+`.
    (
        {"beta": 1.0, "use_bias_correction_kl": False},
        NONE,
        [0.081311, -0.0369, 0.043197, 0, -0.081971, 0.065578, -0.017528, -0.13702, 0],
    ),
    (
        {"beta": 1.0, "num_iterations": 1},
        NONE,
        [0.081311, -0.033333, 0.05, 0, -0.066667, 0.083333, -0.016667, -0.1, 0],
    ),
]


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", report_to="none", vllm_importance_sampling_correction=False, **settings)


def recorded_batch(advantages: list[float], on_policy: bool) -> MicroBatch:
    rollouts, start = [], 0
    for index, length in enumerate(LENGTHS):
        sampled = torch.tensor([place != 2 for place in range(start, start + length)])
        reason = FinishReason.LENGTH if index == 3 else FinishReason.STOP
        ids = tuple(range(start, start + length))
        rollouts.append(Rollout((9,), ids, torch.zeros(length), sampled, reason, 0))
        start += length
    group = ScoredGroup(Group({}, tuple(rollouts), 0), torch.zeros(4, 1), torch.tensor(advantages))
    (row,) = pack([group], 100, True, CPU)
    logprobs, places = torch.tensor(LOGPROBS).double(), row.labels
    return dataclasses.replace(
        row,
        old_logprobs=None if on_policy else (logprobs - torch.tensor(LOG_RATIOS).double())[places],
        scores={"ref_logprobs": (logprobs + torch.tensor(TO_REFERENCE).double())[places]},
    )


def one_completion(advantages: list[float]) -> MicroBatch:
    """A completion whose token labels are the tokens' indices."""
    many = len(advantages)
    rollout = Rollout((9,), range(many), torch.zeros(many), torch.ones(many).bool(), FinishReason.STOP, 0)
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.tensor(advantages))
    return pack([group], 100, True, CPU)[0]


@pytest.mark.parametrize(("settings", "advantages", "expected"), RECORDED, ids=str)
def test_objective_equals_other_trainers(
    settings: dict[str, Any], advantages: list[float], expected: list[float]
) -> None:
    run = config(**{"epsilon_high": 0.28} | settings)
    objective = Objective.from_config(run).with_terms(run, None)
    row = recorded_batch(advantages, on_policy=advantages is NONE)
    logprobs = torch.tensor(LOGPROBS).double().requires_grad_()
    step = StepBatch((), num_loss_tokens=6, num_sequences=4, metrics={}, groups=())
    loss = objective(logprobs[row.labels], torch.zeros(8), row).loss / objective.loss.denominator(step)
    values = [loss.item(), *gradients(loss, logprobs)[0].tolist()]
    assert values == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_levels_agree_on_equal_ratios(loss_type: str) -> None:
    """If all tokens of a completion have one ratio, it is the completion's, so GSPO-token is the token's loss."""
    step = make_step(3, per_token=True)
    row = step.micro_batch(False)
    shift = torch.tensor([0.3, -0.4, 0.1, -0.1, 0.25, -0.3, 0.5, 0.0, -0.6, 0.2, 0.15, -0.2]).double()
    logprobs = step.logprobs.detach()[row.labels].requires_grad_()
    row = dataclasses.replace(row, old_logprobs=logprobs.detach() - shift[row.sequence])
    results = []
    for level in ("token", "sequence"):
        loss = make_objective(loss_type, level=level, beta=0.3)(logprobs, torch.zeros_like(logprobs), row).loss
        results.append((loss.detach(), *gradients(loss, logprobs)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "sequence"), ("sapo", "sequence"), ("gmpo", "token")])
def test_each_turn_gets_its_own_credit(loss_type: str, level: str) -> None:
    """Six tokens of two turns, with advantages 1 and -1: the mean is 0, the gradients are -1/6 and 1/6."""
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    logprobs, row = torch.full((6,), -1.0, requires_grad=True), one_completion(advantages.tolist())
    loss = make_objective(loss_type, level=level)(logprobs, torch.zeros(6), row).loss
    torch.testing.assert_close(gradients(loss, logprobs)[0], -advantages / 6)


# -- The KL term, over all sequences of a tiny model

VOCABULARY, LONG = 3, 3


def tables(seed: int) -> list[torch.Tensor]:
    """Logits of each position for all tokens before it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(VOCABULARY,) * (place + 1) for place in range(LONG)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def logprobs_of(model: list[torch.Tensor], sequence: tuple[int, ...]) -> torch.Tensor:
    at = [model[t][sequence[:t]].log_softmax(-1)[sequence[t]] for t in range(len(sequence))]
    return torch.stack(at) if at else torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("loss_type", "level"), [("dapo", "token"), ("dapo", "sequence"), ("dppo", "sequence")])
def test_kl_gradient_is_the_reverse_divergence(loss_type: str, level: str, on_policy: bool) -> None:
    """Compare the expected gradient, over samples of the old weights, with that of the next tokens' divergences. The
    reference finds one token impossible that the policy has, and the other way round."""
    policy, reference = tables(0), tables(1)
    policy[0][0], reference[1][1, 2] = -30.0, -40.0
    old = [table.clone() for table in policy] if on_policy else tables(2)
    old[0][0] = -30.0
    for table in policy:
        table.requires_grad_()
    run = config(loss_type=loss_type, importance_sampling_level=level, beta=1.0, epsilon_high=0.2)
    objective = Objective.from_config(run).with_terms(run, None)
    expected = torch.zeros((), dtype=torch.float64)
    for place in range(LONG):
        for before in itertools.product(range(VOCABULARY), repeat=place):
            ours, theirs = (model[place][before].log_softmax(-1) for model in (policy, reference))
            weight = logprobs_of(old, before).sum().exp()
            expected = expected + weight * (ours.exp() * (ours - theirs)).sum()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in itertools.product(range(VOCABULARY), repeat=LONG):
        before = logprobs_of(old, sequence)
        row = dataclasses.replace(
            one_completion([0.0] * LONG),
            old_logprobs=None if on_policy else before,
            scores={"ref_logprobs": logprobs_of(reference, sequence)},
        )
        output = objective(logprobs_of(policy, sequence), torch.zeros(LONG), row)
        total = total + before.sum().exp() * output.loss
    for found, wanted in zip(gradients(total, *policy), gradients(expected, *policy), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


# -- Ratios that float32 can't hold


@pytest.mark.parametrize("loss_type", LOSSES)
def test_overflowing_ratios_leave_the_loss_finite(loss_type: str) -> None:
    """Ratios to the old weights, to the reference, and to the sampler with one bound. verl and OpenRLHF bound the
    logarithm by 20, and beyond there is no gradient."""
    signs = itertools.product((99.0, -99.0), (99.0, -99.0), (1.0, -1.0))
    for (log_ratio, to_reference, advantage), level, delta, beta, unbiased in itertools.product(
        signs, ("token", "sequence"), (None, 3.0), (0.0, 0.1), (True, False)
    ):
        logprobs = torch.tensor([-100.0], requires_grad=True)
        row = dataclasses.replace(
            one_completion([advantage]),
            old_logprobs=logprobs.detach() - log_ratio,
            scores={"ref_logprobs": logprobs.detach() + to_reference},
            sampler_logprobs=logprobs.detach() - 2 * log_ratio,
        )
        correction = SamplerCorrection("token_mask", 0.0, None)
        terms = {"level": level, "correction": correction, "beta": beta, "unbiased_kl": unbiased}
        loss = make_objective(loss_type, {"delta": delta}, **terms)(logprobs, torch.zeros(1), row).loss
        (gradient,) = gradients(loss, logprobs)
        assert loss.isfinite() and gradient.isfinite().all()
        if beta == 0 and log_ratio > 0 and loss_type not in ("cispo", "vespo", "dppo"):
            assert gradient.item() == 0


# -- Metrics


def test_cispo_counts_every_clipped_weight() -> None:
    row = recorded_batch(OF_COMPLETIONS, on_policy=False)
    output = make_objective("cispo", {"epsilon_high": 1.28})(torch.tensor(LOGPROBS).double(), torch.zeros(8), row)
    assert [float(x) for x in output.sums["cispo_clip_ratio"]] == [2.0, 6.0], "e^0.3 with A > 0, e^0.5 with A < 0"


# -- Advantages

GROUPS = ([1.0, 0.25, 0.5, 0.0], [2.0, 2.5, 1.0, 1.5])
CENTRED = [[reward - statistics.mean(group) for reward in group] for group in GROUPS]


def divided(by: list[float]) -> list[float]:
    return [value / (scale + 1e-4) for group, scale in zip(CENTRED, by, strict=True) for value in group]


VERL_GROUP = [1.31716, -0.43905, 0.14635, -1.02446, 0.38724, 1.16172, -1.16172, -0.38724]  # its epsilon set to 1e-4
VERL_RLOO = [0.75, -0.25, 0.08333, -0.58333, 0.33333, 1.0, -1.0, -0.33333]
VERL_PLUS_PLUS = [1.11023, -0.37008, 0.12336, -0.86351, 0.49344, 1.48031, -1.48031, -0.49344]  # of equal lengths


@pytest.mark.parametrize(
    ("scale", "baseline", "expected"),
    [
        ("group", "mean", VERL_GROUP),
        ("none", "leave_one_out", VERL_RLOO),
        ("batch_centered", "mean", VERL_PLUS_PLUS),
        ("none", "mean", [value for group in CENTRED for value in group]),
        ("batch", "mean", divided([statistics.stdev([*GROUPS[0], *GROUPS[1]])] * 2)),  # Lite PPO
        ("mean", "mean", [value / statistics.mean(g) for g, c in zip(GROUPS, CENTRED, strict=True) for value in c]),
    ],
)
def test_advantages_equal_other_trainers(scale: str, baseline: str, expected: list[float]) -> None:
    estimator = AdvantageEstimator(scale, "sum_then_normalize", baseline, (1.0,))
    rewards = [torch.tensor(group)[:, None] for group in GROUPS]
    advantages, scores = torch.cat([estimator.of_group(group) for group in rewards]), estimator.step_scores
    if scores is not None:
        advantages = advantages / step_std([scores(group) for group in rewards])
    assert advantages.tolist() == pytest.approx(expected, rel=3e-4, abs=1e-5)  # verl's epsilon is 1e-8 in the third


def test_normalised_rewards_are_summed_and_scaled() -> None:
    """GDPO, arXiv 2601.05242, eq. 4 to 6, with each function's deviation of the group and that of the sums over all."""
    weights, columns = (1.0, 0.5), [(GROUPS[0], [0.0, 3.0, 1.0, 1.0]), (GROUPS[1], [5.0, 4.0, 4.0, 9.0])]
    sums = []
    for pair in columns:
        normal = [[(r - statistics.mean(c)) / (statistics.stdev(c) + 1e-4) for r in c] for c in pair]
        sums += [sum(w * value for w, value in zip(weights, row, strict=True)) for row in zip(*normal, strict=True)]
    expected = [value / (statistics.stdev(sums) + 1e-4) for value in sums]
    estimator = AdvantageEstimator("group", "normalize_then_sum", "mean", weights)
    rewards = [torch.tensor(pair).T for pair in columns]
    scores = estimator.step_scores
    assert scores is not None
    advantages = torch.cat([estimator.of_group(group) for group in rewards]) / step_std(list(map(scores, rewards)))
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)
