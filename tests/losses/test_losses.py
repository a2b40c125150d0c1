"""Properties of every objective, whatever its formula. (The formulas: test_losses_trl.py.)"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_cases import LONGEST, correction_weights, gradients, kl_term, make_objective, make_step, our_loss

from colograd.batch import FinishReason, Group, MicroBatch, Rollout, ScoredGroup, StepBatch, StepConstants
from colograd.config import GRPOConfig
from colograd.config import objective as objective_knobs
from colograd.losses import entropy
from colograd.losses.entropy import EntropyController
from colograd.losses.objective import Objective, SamplerCorrection, top_threshold
from colograd.losses.token_losses import LOSSES
from colograd.policy.packing import pack
from colograd.reporting.metrics import Metrics

CPU = torch.device("cpu")
EVERYTHING: dict[str, Any] = {
    "off_policy_threshold": 0.05, "top_entropy_quantile": 0.6, "beta": 0.4, "entropy_bonus": True,
}  # fmt: skip
CORRECTIONS = {
    "none": None,
    "token_truncate": SamplerCorrection("token_truncate", 0.8, 1.2),
    "sequence_mask": SamplerCorrection("sequence_mask", 0.6, 2.0),
}


def config(**given: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", report_to="none", **given)


def one_group(*completions: FinishReason, advantages: list[float]) -> ScoredGroup:
    """Completions of one token each; token i is the label i, and the sampler gave it probability 1."""
    rollouts = tuple(
        Rollout((9,), (i,), torch.zeros(1), torch.ones(1, dtype=torch.bool), end, 0)
        for i, end in enumerate(completions)
    )
    return ScoredGroup(Group({}, rollouts, 0), torch.zeros(len(rollouts), 1), torch.tensor(advantages))


# -- The sum


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("terms", [{}, EVERYTHING], ids=["alone", "every term"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_sum_does_not_depend_on_the_micro_batches(
    loss_type: str, correction: str, terms: dict[str, Any], level: str
) -> None:
    """The same step in 1, 2, 5 and 12 micro-batches: value, gradients and metrics."""
    step = make_step(3)
    objective = make_objective(loss_type, {"delta": 1.4}, level=level, correction=CORRECTIONS[correction], **terms)
    results, counts = [], []
    for budget in (1000, 50, 15, 1):
        value, outputs = our_loss(objective, step, step.rows(budget, False), 0.3)
        metrics = Metrics()
        for output in outputs:
            metrics.update(output.sums, output.minima, output.maxima)
        results.append((value.detach(), gradients(value, step.logprobs, step.entropies), metrics.reduce()))
        counts.append(len(outputs))
    assert counts == [1, 2, 5, 12]
    (value, wanted, shown), *others = results
    assert wanted[0].any() and wanted[1].any() == bool(terms)
    for other, found, metrics in others:
        torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12)
        assert metrics == pytest.approx(shown, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(loss_type: str) -> None:
    """With a ratio of 1 nothing is clipped: d loss / d logprob = -advantage * the token's weight."""
    objective, step = make_objective(loss_type, {"epsilon_high": 5.0}), make_step(4)
    value, _ = our_loss(objective, step, step.rows(1000, True))
    (gradient,) = gradients(value, step.logprobs)
    tokens, sequences = step.num_loss_tokens, len(step.rollouts)
    for rollout, advantage in zip(step.rollouts, step.advantages.double(), strict=True):
        mask = rollout.sampled.double() * (rollout.finish_reason is FinishReason.STOP)
        weight = {
            "grpo": 1 / (sequences * max(float(mask.sum()), 1.0)),
            "sapo": 1 / (sequences * max(float(mask.sum()), 1.0)),
            "gmpo": 1 / (sequences * max(float(mask.sum()), 1.0)),
            "dr_grpo": 1 / (sequences * LONGEST),
            "luspo": 1 / sequences,
        }.get(loss_type, 1 / tokens)
        torch.testing.assert_close(gradient[list(rollout.completion_ids)], -advantage * weight * mask)


def test_a_clipped_token_has_no_gradient() -> None:
    """Ratio e^0.5 with a positive advantage is above the upper clip, and with a negative one below nothing."""
    group = one_group(FinishReason.STOP, FinishReason.STOP, advantages=[1.0, -1.0])
    table = torch.tensor([-0.5, -0.5], requires_grad=True)
    (row,) = pack([group], 100, False, CPU)
    row = dataclasses.replace(row, old_logprobs=torch.tensor([-1.0, -1.0]))
    output = make_objective("dapo")(table[row.labels], torch.zeros(2), row)
    output.loss.backward()
    assert table.grad is not None and table.grad.tolist() == [0.0, pytest.approx(math.exp(0.5))]
    assert float(output.sums["clip_ratio/high_mean"][0]) == 1.0 and float(output.sums["clip_ratio/low_mean"][0]) == 0.0


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("delta", [None, 1.1])
def test_dppo_is_its_paper_s_formula_token_by_token(corrected: bool, delta: float | None) -> None:
    """arXiv 2602.04879: a truncated constant weight, and a mask of how far the probability has moved. The probabilities
    are compared with the sampler's, or with the old weights' if the sampler has none or isn't trusted."""
    step = make_step(3)
    objective = make_objective(
        "dppo", {"epsilon": 0.05, "epsilon_high": 0.1, "delta": delta},
        correction=CORRECTIONS["sequence_mask"] if corrected else None,
    )  # fmt: skip
    value, _ = our_loss(objective, step, step.rows(30, False))
    expected, masked, label = torch.zeros(()).double(), 0, 0
    advantages = iter(step.advantages.tolist())
    for rollout in step.rollouts:
        advantage = next(advantages)
        for sampler, sampled in zip(rollout.sampler_logprobs.tolist(), rollout.sampled.tolist(), strict=True):
            before = sampler if corrected and not math.isnan(sampler) else float(step.old[label])
            now = float(step.logprobs[label].detach())
            moved = math.exp(now) - math.exp(before)
            inside = moved <= 0.1 if advantage > 0 else moved >= -0.05
            if sampled and rollout.finish_reason is FinishReason.STOP:
                weight = min(math.exp(now - before), delta or 20.0) * inside
                expected = expected - weight * advantage * step.logprobs[label]
                masked += not inside
            label += 1
    expected = expected / step.num_loss_tokens
    assert masked > 3
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        gradients(value, step.logprobs), gradients(expected, step.logprobs), rtol=1e-6, atol=1e-9
    )


def test_icepop_is_the_correction_s_token_mask() -> None:
    """Ring-1T, arXiv 2510.18855: the clipped surrogate of pi / pi_old, weighed by pi_old / sampler of the token where
    that lies between 0.5 and 5, else by 0."""
    step = make_step(3)
    row = step.micro_batch(False)
    row = dataclasses.replace(row, sampler_logprobs=row.sampler_logprobs * 4)  # far enough apart for the bounds
    objective = make_objective("dapo", correction=SamplerCorrection("token_mask", 0.5, 5.0))
    logprobs = step.logprobs[row.labels]
    ratio, weight = (logprobs - row.old_logprobs).exp(), (row.old_logprobs - row.sampler_logprobs).exp()
    weight = torch.where(row.sampler_logprobs.isnan(), 1.0, weight)
    kept = torch.where((weight >= 0.5) & (weight <= 5.0), weight, 0.0)
    surrogate = torch.min(ratio * row.advantages, ratio.clamp(0.8, 1.28) * row.advantages)
    expected = -(kept * surrogate * row.loss_mask).sum()
    assert ((kept == 0) & (row.loss_mask > 0)).any()
    torch.testing.assert_close(objective(logprobs, step.entropies[row.labels], row).loss, expected)


@pytest.mark.parametrize("terms", [{}, EVERYTHING], ids=["alone", "every term"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_row_without_loss_tokens_is_zero_and_finite(loss_type: str, terms: dict[str, Any]) -> None:
    (row,) = pack([one_group(FinishReason.LENGTH, advantages=[1.0])], 100, True, CPU)
    row = dataclasses.replace(row, scores={"ref_logprobs": torch.zeros(1)})
    table = torch.tensor([-0.5], requires_grad=True)
    objective = make_objective(loss_type, correction=CORRECTIONS["token_truncate"], **terms)
    output = objective(table[row.labels], torch.zeros(1), row)
    output.loss.backward()
    assert output.loss.item() == 0 and table.grad is not None and not table.grad.any()
    # There is nothing to take a minimum of, and no mean.
    assert output.minima == output.maxima == {} and all(count == 0 for _, count in output.sums.values())


@pytest.mark.parametrize("loss_type", LOSSES)
def test_what_is_outside_the_loss_can_not_spoil_it(loss_type: str) -> None:
    """The masked token comes from a tool. The policy finds it impossible, and the sampler gave no probability."""
    rollout = Rollout((9,), (0, 1), torch.tensor([-1.0, math.nan]), torch.tensor([True, False]), FinishReason.STOP, 0)
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.tensor([-1.0]))
    (row,) = pack([group], 100, True, CPU)
    row = dataclasses.replace(row, scores={"ref_logprobs": torch.full((2,), -1.0)}, old_logprobs=torch.full((2,), -1.0))
    table = torch.tensor([-1.0, -500.0], requires_grad=True)
    objective = make_objective(loss_type, correction=CORRECTIONS["token_truncate"], **EVERYTHING)
    output = objective(table[row.labels], torch.ones(2), row)
    output.loss.backward()
    assert output.loss.isfinite() and table.grad is not None and table.grad.isfinite().all() and table.grad[1] == 0
    assert all(math.isfinite(value) for value in [*output.minima.values(), *output.maxima.values()])


@pytest.mark.parametrize("budget", [3, 1000])
def test_masked_completions_are_no_minimum(budget: int) -> None:
    """Every counted token is clipped from below. The truncated completion has a ratio of 1 and isn't counted."""
    ends = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP)
    group = one_group(*ends, advantages=[-1.0, -1.0, -1.0])
    new, old = torch.tensor([-2.0, -1.0, -2.0]), torch.full((3,), -1.0)
    for level in ("token", "sequence"):
        objective, metrics = make_objective("dapo", level=level), Metrics()
        for row in pack([group], budget, True, CPU):
            row = dataclasses.replace(row, old_logprobs=old[row.labels])
            output = objective(new[row.labels], torch.zeros(len(row.labels)), row)
            metrics.update(output.sums, output.minima, output.maxima)
        reduced = metrics.reduce()
        assert reduced["clip_ratio/low_min"] == reduced["clip_ratio/low_mean"] == 1.0


def test_the_tensors_of_these_tests_reach_every_branch() -> None:
    """If the tensors missed a branch, the comparisons with TRL would cover less than they claim."""
    steps = [make_step(seed, per_token) for seed, per_token in ((3, False), (4, True))]
    for step in steps:
        ratios = torch.exp(step.logprobs.detach() - step.old)
        assert (ratios < 0.8).any() and (ratios > 1.28).any() and (ratios > 1.4).any()
        row = step.micro_batch(False)
        assert row.sampler_logprobs[row.loss_mask > 0].isnan().any() and not row.loss_mask.all()
        assert (row.advantages == 0).any() and (row.advantages > 0).any() and (row.advantages < 0).any()
        kept = make_objective("dapo", off_policy_threshold=0.05)._on_policy(step.logprobs.detach(), row)
        assert kept.any() and not kept.all()
        for mode, low, high in (("token_truncate", 0.8, 1.2), ("sequence_truncate", 0.7, 1.3)):
            weights = correction_weights(mode, low, high, step.old, row)
            assert (weights == low).any() and (weights == high).any() and ((weights > low) & (weights < high)).any()
            weights = correction_weights(mode.replace("truncate", "mask"), low, high, step.old, row)
            assert (weights == 0).any() and (weights > 0).any()


# -- Entropy over the step


def test_the_threshold_is_torch_s_quantile_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    shares = (0.0, 0.2, 0.333, 1.0)
    expected = [top_threshold(values, share) for share in shares]
    monkeypatch.setattr("colograd.losses.objective.QUANTILE_LIMIT", 1000)
    assert [top_threshold(values, share) for share in shares] == pytest.approx(expected, rel=1e-6)
    assert top_threshold(torch.tensor([1.0, 2.0, 3.0]), 0.25) == 2.5
    assert top_threshold(torch.zeros(0), 0.2) == math.inf


def test_entropies_are_computed_only_for_partial_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, asked = make_step(3), []

    def entropies(row: MicroBatch) -> torch.Tensor:
        asked.append(row)
        return step.entropies[row.labels].detach()

    def known(batch: StepBatch, objective: Objective) -> StepConstants:
        (found,) = {row.step_constants for row in entropy.with_step_entropy(batch, objective, 0.0, entropies).rows}
        return found

    quantile, all_tokens = make_objective("dapo", top_entropy_quantile=0.6), make_objective("dapo")
    one, five = step.batch(step.rows(1000, True)), step.batch(step.rows(15, True))
    for objective, batch in ((all_tokens, one), (all_tokens, five), (quantile, one)):
        assert known(batch, objective).threshold is None and not asked
    threshold = known(five, quantile).threshold
    assert len(asked) == 5 and threshold is not None
    # Another rank has a micro-batch too, with these entropies.
    theirs = torch.full((100,), 9.0)
    monkeypatch.setattr(entropy, "gather", lambda mine: [mine, theirs if isinstance(mine, torch.Tensor) else 1])
    shared = known(one, quantile)
    assert (shared.threshold, shared.tokens) == (9.0, 100.0)


def test_adaptive_coefficient_resumes_from_checkpoint() -> None:
    given = config(use_adaptive_entropy=True, entropy_coef=0.2, entropy_target=1.0)
    first, state = EntropyController(given), type("State", (), {"stateful_callbacks": {}})()
    first.finish({"entropy/bonus": 0.5}, 0.0)
    first.on_step_end(None, state, None)
    second = EntropyController(given)
    second.on_train_begin(None, state, None)
    assert (second.coefficient, second.last_entropy) == (0.2 + 0.005, 0.5)
    second.on_train_begin(None, type("State", (), {"stateful_callbacks": {}})(), None)
    assert (second.coefficient, second.last_entropy, second.applied) == (0.2, math.inf, 0.0)


def test_a_run_without_a_bonus_logs_none() -> None:
    metrics = {"entropy": 1.0}
    EntropyController(config()).finish(metrics, 0.5)
    assert metrics == {"entropy": 1.0}


# -- The registry


def test_a_loss_takes_its_knobs_from_the_configuration() -> None:
    objective = Objective.from_config(config(epsilon_high=0.28, delta=2.0, entropy_coef=0.1))
    assert objective.loss == LOSSES["dapo"](0.2, 0.28, 2.0)  # type: ignore[call-arg]
    assert objective.correction == SamplerCorrection("sequence_mask", None, 3.0)
    assert Objective.from_config(config(vllm_importance_sampling_correction=False)).correction is None
    for name in LOSSES:
        loss = Objective.from_config(config(loss_type=name, vllm_importance_sampling_mode="token_mask")).loss
        assert type(loss) is LOSSES[name]
    assert Objective.from_config(config(loss_type="dr_grpo")).loss.max_completion_length == 512  # type: ignore[attr-defined]


def test_the_configuration_knows_the_registry() -> None:
    assert tuple(LOSSES) == objective_knobs.LOSSES


OWN = '''
from dataclasses import dataclass
import torch
from colograd.losses import TokenLoss

@dataclass(frozen=True)
class Reinforce(TokenLoss):
    """-A log pi, with a knob of its own and one of the configuration's."""

    epsilon: float
    strength: float = 2.0

    def __call__(self, tokens):
        return -self.strength * tokens.advantages * tokens.logprobs

def not_a_loss(): ...
'''


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses_of_the_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_losses_of_the_test", raising=False)


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize("path", ["my_losses_of_the_test:Reinforce", "my_losses_of_the_test.Reinforce"])
def test_a_loss_of_one_s_own_comes_with_every_term(path: str) -> None:
    objective = Objective.from_config(config(loss_type=path, epsilon=0.3))
    assert (objective.loss.epsilon, objective.loss.strength) == (0.3, 2.0)  # type: ignore[attr-defined]
    step = make_step(3)
    objective = dataclasses.replace(objective, correction=None, terms=(kl_term(0.1),), entropy_bonus=True)
    value, _ = our_loss(objective, step, step.rows(15, False), 0.2)
    row = step.micro_batch(False)
    difference = (row.scores["ref_logprobs"] - step.logprobs[row.labels]) * row.loss_mask
    kl = (difference.exp() - difference - 1) * (step.logprobs[row.labels] - row.old_logprobs).exp()
    per_token = -2 * row.advantages * step.logprobs[row.labels] + 0.1 * kl - 0.2 * step.entropies[row.labels]
    expected = (per_token * row.loss_mask).sum() / step.num_loss_tokens
    torch.testing.assert_close(value, expected)


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("dapoo", r"`loss_type` 'dapoo' isn't supported: choose one of dapo, .*, or give the import path of your own"),
        ("my_losses_of_the_test:Reinforc", "has no attribute 'Reinforc'. Did you mean 'Reinforce'?"),
        ("no_such_module_at_all:Loss", "module 'no_such_module_at_all' can't be imported"),
        ("my_losses_of_the_test:not_a_loss", "must be a class derived from colograd.losses.TokenLoss"),
    ],
)
def test_a_loss_that_is_not_there_is_one_clear_error(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective.from_config(config(loss_type=path))


@pytest.mark.parametrize(
    ("given", "every_group"),
    [({}, False), ({"entropy_coef": 0.1}, True), ({"use_adaptive_entropy": True}, True), ({"loss_type": "sapo"}, False),
     ({"top_entropy_quantile": 0.2}, True), ({"off_policy_mask_threshold": 0.5}, False)],
)  # fmt: skip
def test_groups_without_a_signal_are_packed_where_they_matter(given: dict[str, Any], every_group: bool) -> None:
    objective = Objective.from_config(config(**given))
    assert objective.every_group == every_group
    assert dataclasses.replace(objective, terms=(kl_term(0.1),)).every_group


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("on_policy", [True, False])
def test_a_zero_advantage_gives_no_gradient(loss_type: str, on_policy: bool) -> None:
    """Objectives without `every_group` get no gradient from groups with zero advantages."""
    step = make_step(3)
    step.groups = [dataclasses.replace(g, advantages=torch.zeros_like(g.advantages)) for g in step.groups]
    objective = make_objective(loss_type, off_policy_threshold=0.05, correction=CORRECTIONS["token_truncate"])
    value, _ = our_loss(objective, step, step.rows(1000, on_policy))
    assert not objective.every_group and not gradients(value, step.logprobs)[0].any()


def test_an_empty_step_has_a_denominator() -> None:
    empty = StepBatch((), 0, 0, {}, ())
    assert all(make_objective(name).loss.denominator(empty) > 0 for name in LOSSES)
