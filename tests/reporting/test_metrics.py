"""Metrics and phase times."""

from __future__ import annotations

import math

import pytest
import torch

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.reporting import metrics as module
from colograd.reporting.events import NoRecord
from colograd.reporting.metrics import Metrics, PhaseTimes
from colograd.rollout.statistics import RolloutStatistics


def test_a_mean_is_all_sums_by_all_counts() -> None:
    metrics = Metrics()
    metrics.update({"loss": (6.0, 2)}, {}, {})
    metrics.update({"loss": (torch.tensor(2.0), torch.tensor(6.0))}, {}, {})
    metrics.update({"plain": (3.0, 1)}, {}, {})
    assert metrics.reduce() == {"loss": 1.0, "plain": 3.0}


def test_a_total_is_the_sum_of_all_values() -> None:
    metrics = Metrics()
    for value in (2.0, torch.tensor(-0.5), 4):
        metrics.total("tokens", value)
    metrics.total("nothing", 0)
    assert metrics.reduce() == {"tokens": 5.5, "nothing": 0.0}


def test_minima_and_maxima_are_of_everything_seen() -> None:
    metrics = Metrics()
    for value in (2.0, torch.tensor(-1.0), 5):
        metrics.update({}, {"low": value}, {"high": value})
    assert metrics.reduce() == {"low": -1.0, "high": 5.0}


def test_a_loss_s_output_is_taken_at_once() -> None:
    metrics = Metrics()
    for total in (1.0, 3.0):
        metrics.update({"mean": (total, 2)}, {"min": total}, {"max": total})
    assert metrics.reduce() == {"mean": 1.0, "min": 1.0, "max": 3.0}


def test_a_mean_of_nothing_is_left_out() -> None:
    metrics = Metrics()
    metrics.update({"nothing": (torch.tensor(0.0), torch.tensor(0.0))}, {}, {})
    assert metrics.reduce() == {} == Metrics().reduce()


def test_tensors_keep_their_exact_value() -> None:
    metrics = Metrics()
    metrics.update({"x": (torch.tensor(0.1), 1)}, {}, {})
    assert metrics.reduce() == {"x": torch.tensor(0.1).item()}


def test_ranks_are_weighed_by_their_counts_and_totals_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has 1 thing, rank 1 has 3: the mean is over 4 things, not over 2 means. Names may differ."""
    other = {("sum", "mean"): 9.0, ("count", "mean"): 3.0, ("sum", "theirs"): 4.0, ("count", "theirs"): 2.0}
    other |= {("total", "tokens"): 30.0, ("total", "few"): 2.0}
    other |= {("min", "low"): -2.0, ("max", "high"): 0.5, ("max", "top"): 1.0}
    monkeypatch.setattr(module, "gather", lambda local: [local, other])
    metrics = Metrics()
    metrics.update({"mean": (1.0, 1)}, {}, {})
    metrics.update({"ours": (5.0, 1)}, {}, {})
    metrics.total("tokens", 12.0)
    metrics.update({}, {"low": 3.0}, {"high": 3.0})
    assert metrics.reduce() == {
        "mean": 10 / 4, "ours": 5.0, "theirs": 2.0, "tokens": 42.0, "few": 2.0, "low": -2.0, "high": 3.0, "top": 1.0,
    }  # fmt: skip


# -- Phase times


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> PhaseTimes:
    """A clock that goes on by one second each time it is read."""
    ticks = iter(range(1000))
    monkeypatch.setattr(PhaseTimes, "_now", lambda self: float(next(ticks)))
    return PhaseTimes()


def test_phases_add_up_and_start_anew(times: PhaseTimes) -> None:
    for name in ("train", "sync", "train"):
        with times.phase(name):
            pass
    assert times.take() == {"time/train": 2.0, "time/sync": 1.0}
    assert times.take() == {}


def test_a_phase_that_raises_is_counted(times: PhaseTimes) -> None:
    with pytest.raises(KeyError):
        with times.phase("train"):
            raise KeyError
    assert times.take() == {"time/train": 1.0}


def test_seconds_can_be_charged_to_another_phase(times: PhaseTimes) -> None:
    with times.phase("generate"):
        times.move("generate", "reward", 0.25)
    assert times.take() == {"time/generate": 0.75, "time/reward": 0.25}


def test_retries_of_an_allocator_count_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = PhaseTimes(synchronize=True)
    stats["num_alloc_retries"] = 5
    assert [times.end_step()["train/alloc_retries"] for _ in range(2)] == [3.0, 0.0]
    assert "train/alloc_retries" not in PhaseTimes().end_step()


def test_tokens_that_the_sampler_could_not_score_are_counted() -> None:
    logprobs, sampled = torch.tensor([-1.0, math.nan, math.nan]), torch.tensor([True, True, False])
    rollout = Rollout((1,), (2, 3, 4), logprobs, sampled, FinishReason.STOP, 0)
    group = ScoredGroup(Group({}, (rollout,), 0), torch.zeros(1, 1), torch.zeros(1))
    found = RolloutStatistics.of([group], lambda rewards: rewards[:, 0], mask_truncated=False).metrics(["r"])
    assert found["sampling/unscored_tokens"] == 1, "a tool's token isn't one of them"


def test_an_unrecorded_run_has_each_context() -> None:
    recorder = NoRecord()
    assert recorder.watching()(lambda: 3)() == 3, "the sampler decorates a function with it"
    with recorder.run(), recorder.trains(None), recorder.trains_early(()):
        recorder.step({})
