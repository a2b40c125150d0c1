"""A user's stage must return the right types, and one error names them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from colograd.batch import FinishReason, Group, LossOutput, Prompt, Rollout
from colograd.rollout.checks import checked_advantages, checked_groups, checked_rewards
from colograd.training.evaluation import count_passes, pass_at
from colograd.training.learner import checked_loss

PROMPTS = [Prompt({"prompt": "a"}, (1, 2), position) for position in (3, 4)]


def rollout(length: int, **changes: Any) -> Rollout:
    given: dict[str, Any] = {
        "input": (1, 2),
        "completion_ids": (5,) * length,
        "sampler_logprobs": torch.zeros(length),
        "sampled": torch.ones(length, dtype=torch.bool),
        "finish_reason": FinishReason.STOP,
        "policy_version": 0,
    }
    return Rollout(**(given | changes))


def group(position: int = 3, **changes: Any) -> Group:
    return Group({"prompt": "a"}, (rollout(2), rollout(3, **changes)), position)


def test_whole_groups_go_through_in_the_order_in_which_they_come() -> None:
    assert [g.position for g in checked_groups(iter([group(4), group(3)]), PROMPTS)] == [4, 3]
    few = dataclasses.replace(group(4), rollouts=(rollout(1),))
    assert len(list(checked_groups([few, group(3)], PROMPTS))) == 2, "a group may be smaller than num_generations"


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        (["text"], "a str. `generate` must yield a colograd.batch.Group"),
        ([group(5)], "a group at position 5, but must yield exactly one group for each"),
        ([group(3), group(3)], "a group at position 3, but"),
        ([group(3)], r"no group for 1 of 2 prompts \(first position: 4\)"),
        ([dataclasses.replace(group(), rollouts=())], "prompt 3: the group has no rollouts"),
        ([dataclasses.replace(group(), rollouts=("a",))], "rollout 0 is a str. A rollout must be"),
        ([group(completion_ids=())], "rollout 1 has an empty prompt or completion"),
        ([group(sampler_logprobs=torch.zeros(2))], r"sampler_logprobs of rollout 1 is a tensor of shape \[2\]"),
        ([group(sampled=[True] * 3)], "sampled of rollout 1 is a list, but must be a tensor"),
        ([group(input=())], "rollout 1 has an empty prompt or completion"),
    ],
)
def test_what_generate_must_not_yield_is_named(yielded: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(checked_groups(iter(yielded), PROMPTS))


def test_a_caller_that_has_enough_closes_what_generates() -> None:
    closed = []

    def generate() -> Any:
        try:
            yield group(3)
            yield group(4)
        finally:
            closed.append(True)

    groups = checked_groups(generate(), PROMPTS)
    next(groups)
    groups.close()
    assert closed == [True]


def test_rewards_are_a_column_per_function() -> None:
    given = torch.tensor([[1.0, math.nan], [0.0, 2.0]], dtype=torch.float64)
    assert checked_rewards(given, group(), 2).dtype == torch.float32
    for wrong, shown in ((torch.zeros(2), r"shape \[2\]"), ([0.0, 1.0], "a list"), (torch.zeros(2, 3), r"\[2, 3\]")):
        with pytest.raises(ValueError, match=rf"`score` returned .*{shown}.* = \[2, 2\]"):
            checked_rewards(wrong, group(), 2)
    with pytest.raises(ValueError, match="infinite reward"):
        checked_rewards(torch.full((2, 2), math.inf), group(), 2)


def test_advantages_are_one_per_completion_or_one_per_token() -> None:
    for size in (2, 5):
        assert checked_advantages(torch.ones(size), group()).shape == (size,)
    for wrong in (torch.ones(3), torch.ones(2, 1), [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"`compute_advantages` returned .*: \[2\] or \[5\]\."):
            checked_advantages(wrong, group())
    with pytest.raises(ValueError, match=r"isn't finite\. Return 0"):
        checked_advantages(torch.tensor([1.0, math.nan]), group())


def test_a_loss_is_a_differentiable_scalar_with_its_metrics() -> None:
    loss = torch.zeros((), requires_grad=True)
    assert checked_loss(LossOutput(loss, {}, {}, {})).loss is loss
    assert checked_loss(LossOutput(loss.detach(), {}, {}, {}), differentiable=False)
    with pytest.raises(ValueError, match=r"`compute_loss` returned a tensor of shape \[\], but must return"):
        checked_loss(loss)
    for wrong, shown in (
        (loss.detach(), r"shape \[\] without a graph"),
        (torch.zeros(3, requires_grad=True), r"\[3\]"),
        (0.5, "a float"),
    ):
        with pytest.raises(ValueError, match=f"compute_loss returned .*{shown} as the loss.*the SUM over"):
            checked_loss(LossOutput(wrong, {}, {}, {}))


# -- pass@k: the estimate is a mean over all choices of k completions


def test_pass_at_k_is_the_share_of_choices_with_a_pass() -> None:
    for n, c in [(1, 0), (1, 1), (4, 0), (4, 1), (8, 3), (8, 8)]:
        found = pass_at([(n, c)], n)
        assert list(found) == [f"pass@{k}" for k in (1, 2, 4, 8) if k <= n]
        for k in (k for k in (1, 2, 4, 8) if k <= n):
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert found[f"pass@{k}"] == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_the_mean_over_prompts_with_k_judged_completions() -> None:
    assert pass_at([(4, 4), (4, 0), (1, 1)], 4) == {"pass@1": 2 / 3, "pass@2": 0.5, "pass@4": 0.5}
    assert pass_at([(6, 1)], 6).keys() == {"pass@1", "pass@2", "pass@4"}
    assert pass_at([(0, 0)], 4) == {}
    assert count_passes(torch.tensor([1.0, 0.99, math.nan, 2.0]), 1.0) == (3, 2)
