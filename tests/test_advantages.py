"""Advantages: TRL's formula on one group."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from colograd.advantages import group_advantages, group_std

NAN = math.nan


@pytest.fixture(scope="module")
def nanstd() -> Callable[..., torch.Tensor]:
    """TRL's own standard deviation."""
    utils = pytest.importorskip("trl.trainer.utils")
    return utils.nanstd  # type: ignore[no-any-return]


def trl_advantages(rewards: torch.Tensor, scale: str, nanstd: Callable[..., torch.Tensor]) -> torch.Tensor:
    """GRPOTrainer._generate_and_score_completions of TRL 1.16, on one group."""
    advantages = rewards - torch.nanmean(rewards)
    if scale != "none":
        advantages = advantages / (nanstd(rewards) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("abstained", [(), (0,), (2, 5, 7)])
def test_advantages_equal_trl_s(scale: str, abstained: tuple[int, ...], nanstd: Callable[..., torch.Tensor]) -> None:
    for seed in range(20):
        rewards = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        rewards[list(abstained)] = NAN
        expected = trl_advantages(rewards, scale, nanstd)
        torch.testing.assert_close(group_advantages(rewards, scale), expected, rtol=1e-5, atol=1e-6)


def test_scaling_divides_by_the_sample_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    deviation = math.sqrt(4 * 0.25 / 3)  # n - 1
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5])
    torch.testing.assert_close(group_advantages(rewards, "none"), expected)
    torch.testing.assert_close(group_advantages(rewards, "group"), expected / (deviation + 1e-4))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_an_abstention_gets_zero_and_moves_nobody(scale: str) -> None:
    judged = torch.tensor([1.0, 0.0, 0.5])
    advantages = group_advantages(torch.tensor([1.0, NAN, 0.0, 0.5, NAN]), scale)
    assert advantages[[1, 4]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(advantages[[0, 2, 3]], group_advantages(judged, scale))


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [NAN] * 4, [0.5, NAN, NAN, NAN], [0.25, 0.25, NAN, 0.25]])
def test_no_difference_is_no_advantage(rewards: list[float], scale: str) -> None:
    assert group_advantages(torch.tensor(rewards), scale).tolist() == [0.0] * 4


def test_the_deviation_of_fewer_than_two_is_zero() -> None:
    assert group_std(torch.tensor([3.0, NAN])) == 0 == group_std(torch.tensor([NAN]))
    assert group_std(torch.tensor([1.0, 3.0, NAN])) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e3 + 0.1])
@pytest.mark.parametrize("size", [3, 7, 8, 12])
def test_equal_rewards_give_exactly_zero_whatever_their_value(value: float, size: int) -> None:
    """A group counts as dead exactly where this is zero: rounding of the mean must not wake it."""
    assert not group_advantages(torch.full((size,), value), "group").any()
