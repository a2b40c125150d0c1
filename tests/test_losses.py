"""Objectives, each against TRL's own implementation on the same tensors.

The log-probabilities are one float64 table with an entry per completion token of the step. TRL gets it as a padded
batch; ours gets it through `pack`, which must find each token's entry. So value and gradient with respect to the
table say that the formulas, the masks and the packing agree. TRL's loss is `GRPOTrainer._compute_loss` itself, on a
stand-in for the trainer; its sampler correction is inside a method of 600 lines, so `trl_ratio` repeats those lines.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colograd.batch import FinishReason, Group, LossOutput, MicroBatch, Rollout, ScoredGroup, StepBatch
from colograd.config import GRPOConfig
from colograd.losses import LOSSES, ClippedLoss, SamplerCorrection
from colograd.metrics import Metrics
from colograd.packing import pack

MAX_COMPLETION_LENGTH = 9
CORRECTIONS = {
    "none": None,
    "token_truncate": SamplerCorrection("token_truncate", 0.8, 1.2),
    "token_mask": SamplerCorrection("token_mask", None, 1.2),
    "sequence_truncate": SamplerCorrection("sequence_truncate", None, 1.3),
    "sequence_mask": SamplerCorrection("sequence_mask", 0.6, 2.0),
}
# epsilon, epsilon_high, delta
CLIPS = {"symmetric": (0.2, 0.2, None), "clip higher": (0.1, 0.28, None), "two-sided": (0.2, 0.25, 1.4)}


@dataclasses.dataclass
class Step:
    """Groups of one step whose completion token number i has the label i."""

    groups: list[ScoredGroup]
    table: torch.Tensor  # log-probabilities, requires grad
    old: torch.Tensor  # those of the weights that sampled
    entropy: torch.Tensor
    num_loss_tokens: int

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.group.rollouts]

    @property
    def batch(self) -> StepBatch:
        return StepBatch((), self.num_loss_tokens, len(self.rollouts), {}, True, ())

    def rows(self, budget: int, on_policy: bool) -> list[MicroBatch]:
        rows = pack(self.groups, budget, True, torch.device("cpu"))
        return [row if on_policy else dataclasses.replace(row, old_logprobs=self.old[row.labels]) for row in rows]

    def padded(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """[C] of each rollout -> (B, longest), padded with zeros."""
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)

    def padded_table(self, table: torch.Tensor) -> torch.Tensor:
        return self.padded([table[list(rollout.completion_ids)] for rollout in self.rollouts])


def make_step(seed: int = 0, per_token: bool = False) -> Step:
    """Three groups of four ragged completions; some tokens are a tool's, some completions truncated (and masked)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, MAX_COMPLETION_LENGTH + 1, (3, 4), generator=generator).tolist()
    total = sum(map(sum, lengths))
    table = -normal(total).abs() - 0.1
    old = table + 0.2 * normal(total)
    sampler = old + 0.2 * normal(total)
    groups, start, loss_tokens = [], 0, 0
    for position, row in enumerate(lengths):
        rollouts = []
        for index, length in enumerate(row):
            truncated = (position, index) in ((0, 1), (2, 3))
            ids = tuple(range(start, start + length))
            sampled = torch.rand(length, generator=generator) < 0.8
            sampled[0] = True
            reason = FinishReason.LENGTH if truncated else FinishReason.STOP
            rollouts.append(Rollout((7,) * (position + 1), ids, sampler[list(ids)], sampled, reason, 0))
            loss_tokens += 0 if truncated else int(sampled.sum())
            start += length
        # float32 as in a run, so both sides see the same numbers
        advantages = normal(sum(row) if per_token else len(row)).float()
        groups.append(ScoredGroup(Group({}, tuple(rollouts), position), torch.zeros(4, 1), advantages))
    return Step(groups, table.requires_grad_(), old, normal(total).abs(), loss_tokens)


def make_loss(loss_type: str, correction: str, clip: str) -> ClippedLoss:
    return LOSSES[loss_type](*CLIPS[clip], CORRECTIONS[correction], MAX_COMPLETION_LENGTH)


def our_loss(loss: ClippedLoss, step: Step, budget: int, on_policy: bool) -> tuple[torch.Tensor, list[LossOutput]]:
    """What the trainer does: the sum over micro-batches by the step's denominator."""
    outputs = [loss(step.table[row.labels], step.entropy[row.labels], row) for row in step.rows(budget, on_policy)]
    return torch.stack([output.loss for output in outputs]).sum() / loss.denominator(step.batch), outputs


# -- TRL


@pytest.fixture(scope="module")
def trl_compute_loss() -> Callable[..., torch.Tensor]:
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss  # type: ignore[no-any-return]


def trl_ratio(
    correction: SamplerCorrection, old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """TRL 1.16, GRPOTrainer._generate_and_score_completions: (B, T) or (B, 1)."""
    difference = (old - sampler) * mask
    if correction.mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if correction.mode.endswith("truncate"):
        return torch.clamp(ratio, min=correction.low, max=correction.high)
    low = -math.inf if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


def trl_loss(
    compute_loss: Callable[..., torch.Tensor], loss_type: str, loss: ClippedLoss, step: Step, on_policy: bool
) -> tuple[torch.Tensor, dict[str, float]]:
    """TRL's loss on one rank and one micro-batch, and its metrics."""
    rollouts, correction = step.rollouts, loss.correction
    logprobs, entropy = step.padded_table(step.table), step.padded_table(step.entropy)
    completion_mask = step.padded(
        [
            torch.full((len(r.completion_ids),), float(r.finish_reason is not FinishReason.LENGTH)).double()
            for r in rollouts
        ]
    )
    tool_mask = step.padded([r.sampled.double() for r in rollouts])
    old = logprobs.detach() if on_policy else step.padded_table(step.old)
    advantages = torch.cat([group.advantages for group in step.groups]).double()
    if len(advantages) != len(rollouts):
        advantages = step.padded_table(advantages)
    inputs = {
        "prompt_ids": torch.zeros(len(rollouts), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(rollouts), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(completion_mask, dtype=torch.int64),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": advantages,
        "num_items_in_batch": (completion_mask * tool_mask).sum(),
    }
    if correction is not None or not on_policy:  # with vLLM's correction TRL always computes them
        inputs["old_per_token_logps"] = old
    if correction is not None:
        sampler = step.padded([r.sampler_logprobs for r in rollouts])
        inputs["importance_sampling_ratio"] = trl_ratio(correction, old, sampler, completion_mask * tool_mask)
    one_rank = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )  # fmt: skip
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, entropy, None),
        accelerator=one_rank,
        args=SimpleNamespace(delta=loss.delta, steps_per_generation=1, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        epsilon_low=loss.epsilon,
        epsilon_high=loss.epsilon_high,
        beta=0.0,
        importance_sampling_level="token",
        use_vllm=True,
        vllm_importance_sampling_correction=correction is not None,
        max_completion_length=MAX_COMPLETION_LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    value = compute_loss(trainer, trainer.model, inputs)
    return value, {name: values[-1] for name, values in metrics["train"].items()}


# -- Against TRL


@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient_equal_trl_s(
    loss_type: str, correction: str, clip: str, on_policy: bool, trl_compute_loss: Callable[..., torch.Tensor]
) -> None:
    loss = make_loss(loss_type, correction, clip)
    for seed, per_token in ((0, False), (1, False), (2, True)):
        step = make_step(seed, per_token)
        theirs, _ = trl_loss(trl_compute_loss, loss_type, loss, step, on_policy)
        ours, _ = our_loss(loss, step, 30, on_policy)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
        (expected,) = torch.autograd.grad(theirs, step.table)
        (gradient,) = torch.autograd.grad(ours, step.table)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
        assert expected.abs().sum() > 0


@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("clip", ["symmetric", "clip higher"])  # TRL counts clips after delta has been applied
def test_metrics_equal_trl_s(clip: str, on_policy: bool, trl_compute_loss: Callable[..., torch.Tensor]) -> None:
    loss, step = make_loss("dapo", "token_mask", clip), make_step()
    _, theirs = trl_loss(trl_compute_loss, "dapo", loss, step, on_policy)
    metrics = Metrics()
    for output in our_loss(loss, step, 30, on_policy)[1]:
        metrics.update(output.sums, output.minima, output.maxima)
    ours = metrics.reduce()
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-6)
    assert on_policy or theirs["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("budget", [3, 1000])
def test_masked_completions_are_no_minimum(budget: int) -> None:
    """Every counted token is clipped from below; the truncated completion, which isn't counted, has a ratio of 1."""
    ends = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP)
    rollouts = tuple(
        Rollout((9,), (i,), torch.full((1,), -1.0), torch.ones(1, dtype=torch.bool), end, 0)
        for i, end in enumerate(ends)
    )
    group = ScoredGroup(Group({}, rollouts, 0), torch.zeros(3, 1), torch.tensor([-1.0, -1.0, -1.0]))
    new, old = torch.tensor([-2.0, -1.0, -2.0]), torch.full((3,), -1.0)
    loss, metrics = make_loss("dapo", "token_truncate", "symmetric"), Metrics()
    for row in pack([group], budget, True, torch.device("cpu")):
        row = dataclasses.replace(row, old_logprobs=old[row.labels])
        output = loss(new[row.labels], torch.zeros(len(row.labels)), row)
        metrics.update(output.sums, output.minima, output.maxima)
    reduced = metrics.reduce()
    assert reduced["clip_ratio/low_min"] == reduced["clip_ratio/low_mean"] == 1.0
    assert reduced["sampling/importance_sampling_ratio/min"] == 1.0


@pytest.mark.parametrize("clip", CLIPS)
def test_the_tensors_of_these_tests_reach_every_branch(clip: str) -> None:
    """Else the comparisons above would compare less than they say."""
    epsilon, epsilon_high, delta = CLIPS[clip]
    steps = [make_step(seed) for seed in (0, 1)]
    ratios = torch.cat([torch.exp(step.table.detach() - step.old) for step in steps])
    assert (ratios < 1 - epsilon).any() and (ratios > 1 + epsilon_high).any()
    assert delta is None or (ratios > delta).any()
    for correction in filter(None, CORRECTIONS.values()):
        weights = torch.cat(
            [correction.weights(step.old[row.labels], row) for step in steps for row in step.rows(30, False)]
        )
        bounds = [b for b in (correction.low, correction.high) if b is not None]
        if correction.mode.endswith("mask"):
            assert (weights == 0).any() and (weights > 0).any(), correction
        else:
            assert all((weights == bound).any() for bound in bounds), correction


# -- What holds of every loss


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_sum_does_not_depend_on_the_micro_batches(loss_type: str, correction: str) -> None:
    loss, step = make_loss(loss_type, correction, "two-sided"), make_step(3)
    values, gradients, counts = [], [], []
    for budget in (1, 17, 30, 1000):
        value, outputs = our_loss(loss, step, budget, on_policy=False)
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, step.table)[0])
        counts.append(len(outputs))
    assert counts[0] == len(step.rollouts) > counts[1] > counts[2] > counts[3] == 1
    for value, gradient in zip(values[1:], gradients[1:], strict=True):
        torch.testing.assert_close(value, values[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(loss_type: str) -> None:
    """With a ratio of 1 nothing is clipped: d loss / d logprob = -advantage * the token's weight."""
    loss, step = make_loss(loss_type, "none", "two-sided"), make_step(4)
    value, _ = our_loss(loss, step, 1000, on_policy=True)
    (gradient,) = torch.autograd.grad(value, step.table)
    tokens, sequences = step.num_loss_tokens, len(step.rollouts)
    advantages = torch.cat([group.advantages for group in step.groups]).double()
    for rollout, advantage in zip(step.rollouts, advantages, strict=True):
        mask = rollout.sampled.double() * (rollout.finish_reason is FinishReason.STOP)
        weight = {
            "dapo": 1 / tokens,
            "bnpo": 1 / tokens,
            "grpo": 1 / (sequences * max(float(mask.sum()), 1.0)),
            "dr_grpo": 1 / (sequences * MAX_COMPLETION_LENGTH),
        }[loss_type]
        torch.testing.assert_close(gradient[list(rollout.completion_ids)], -advantage * weight * mask)


def test_a_clipped_token_has_no_gradient() -> None:
    """Ratio e^0.5 with a positive advantage is above the upper clip, and with a negative one below nothing."""
    rollouts = tuple(
        Rollout((1,), (i,), torch.zeros(1), torch.ones(1, dtype=bool), FinishReason.STOP, 0) for i in (0, 1)
    )
    group = ScoredGroup(Group({}, rollouts, 0), torch.zeros(2, 1), torch.tensor([1.0, -1.0]))
    table = torch.tensor([-0.5, -0.5], requires_grad=True)
    (row,) = pack([group], 100, False, torch.device("cpu"))
    row = dataclasses.replace(row, old_logprobs=torch.tensor([-1.0, -1.0]))
    output = make_loss("dapo", "none", "symmetric")(table[row.labels], torch.zeros(2), row)
    output.loss.backward()
    assert table.grad is not None and table.grad.tolist() == [0.0, pytest.approx(math.exp(0.5))]
    assert float(output.sums["clip_ratio/high_mean"][0]) == 1.0 and float(output.sums["clip_ratio/low_mean"][0]) == 0.0


def test_a_row_without_loss_tokens_is_zero_and_finite() -> None:
    rollout = Rollout((1,), (0, 1), torch.zeros(2), torch.ones(2, dtype=torch.bool), FinishReason.LENGTH, 0)
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.ones(1))
    (row,) = pack([group], 100, True, torch.device("cpu"))
    for loss_type in LOSSES:
        table = torch.tensor([-0.5, -0.5], requires_grad=True)
        output = make_loss(loss_type, "sequence_mask", "symmetric")(table[row.labels], torch.zeros(2), row)
        output.loss.backward()
        assert output.loss.item() == 0 and table.grad is not None and not table.grad.any()
        # There is nothing to take a minimum of, and no mean.
        assert output.minima == output.maxima == {} and all(count == 0 for _, count in output.sums.values())


def test_a_loss_takes_its_knobs_from_the_configuration() -> None:
    given = {"output_dir": "unused", "report_to": "none", "epsilon_high": 0.28, "delta": 2.0}
    loss = LOSSES["dapo"].from_config(GRPOConfig(**given))
    assert (loss.epsilon, loss.epsilon_high, loss.delta, loss.max_completion_length) == (0.2, 0.28, 2.0, 512)
    assert loss.correction == SamplerCorrection("sequence_mask", None, 3.0)
    assert LOSSES["grpo"].from_config(GRPOConfig(**given, vllm_importance_sampling_correction=False)).correction is None


def test_an_empty_step_has_a_denominator() -> None:
    empty = StepBatch((), 0, 0, {}, True, ())
    assert all(make_loss(name, "none", "symmetric").denominator(empty) > 0 for name in LOSSES)
