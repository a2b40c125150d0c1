"""Training between the steps of a rank's own engine (`overlap: auto`): in its tail, on one rank too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from overlapping import STEPS, apart, check_resumed, is_replayed, results, start, weights

from colograd.batch import FinishReason, Group, PackedRow, Rollout, ScoredGroup
from colograd.config import GRPOConfig
from colograd.engine.load import Load
from colograd.extensions.overlap.beside_decoding import BesideDecoding
from colograd.extensions.overlap.finished_groups import OwnGroups
from colograd.extensions.overlap.rules import describe, finished_groups
from colograd.extensions.recording.event_log import events_of
from colograd.policy.packing import plan_rows
from colograd.reporting.metrics import PhaseTimes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("between")
    done = start(tiny_model, folder, "compare", ranks=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "overlap: finished groups are trained between the engine's steps when at most 1/4" in done.stdout
    return folder


def trained_before_the_last(events: Sequence[Any], step: int) -> set[int]:
    """Positions that were trained before a rank's last group was sampled."""
    of_step = [event for event in events if event[2] == step]
    last = max(event[0] for event in of_step if event[3] == "sampled")
    return {at for event in of_step if event[3] == "trained between" and event[0] < last for at in event[4]}


@pytest.mark.slow
@pytest.mark.engine
def test_one_rank_trains_finished_groups_before_its_last_one_is_sampled(compared: Path) -> None:
    (rank,) = results(compared, "compare")
    for step, counted in enumerate(rank["overlapped"]["steps"]):
        early = trained_before_the_last(rank["overlapped"]["events"], step)
        assert 4 <= len(early) <= 7, "two micro-batches of the seven that finish first"
        assert 0 < counted["train/early_tokens"] < counted["train/packed_tokens"]
        assert counted["train/micro_batches"] <= 5
    assert all("train/early_tokens" not in step for step in rank["apart"]["steps"])


@pytest.mark.slow
@pytest.mark.engine
def test_the_update_is_the_same_up_to_rounding_and_a_replay_s_the_same_to_the_bit(compared: Path) -> None:
    (rank,) = results(compared, "compare")
    for mine, theirs in zip(rank["overlapped"]["steps"], rank["apart"]["steps"], strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "completions/mean_length", "reward"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    assert apart(weights(compared, "overlapped"), weights(compared, "apart")) < 1e-6
    assert all(partition and partition[0] for partition in rank["overlapped"]["partition"])
    assert is_replayed(rank)


@pytest.mark.slow
@pytest.mark.engine
def test_the_report_s_lanes_have_it_amid_the_rollout(compared: Path) -> None:
    (rank,) = results(compared, "compare")
    lanes = [event for event in events_of(compared / "overlapped") if event["kind"] == "rollout"]
    for lane, step in zip(lanes, rank["overlapped"]["steps"], strict=True):
        assert sum(tokens for *_, tokens in lane["trained"]) == step["train/early_tokens"]
        assert all(0 < start <= end <= lane["seconds"] for _, start, end, _ in lane["trained"])


@pytest.mark.slow  # test_resume.py kills a plain run
@pytest.mark.engine
def test_killed_amid_a_micro_batch_between_two_steps_nothing_is_lost(
    compared: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert start(tiny_model, tmp_path, "kill", ranks=1).returncode
    check_resumed(tiny_model, tmp_path, "resume", ranks=1)
    assert apart(weights(tmp_path, "overlapped"), weights(compared, "apart")) < 1e-6


@pytest.mark.slow
@pytest.mark.engine
def test_a_rank_amid_its_tail_and_one_that_has_sampled_share_a_rank_s_groups(tiny_model: Path, tmp_path: Path) -> None:
    done = start(tiny_model, tmp_path, "both")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "while others sample; between its own engine's steps finished ones when at most 1/4" in done.stdout
    first, second = (rank["overlapped"] for rank in results(tmp_path, "both"))
    for step in range(STEPS):
        between = trained_before_the_last(second["events"], step)
        taken = {at for e in first["events"] if e[2] == step and e[3] == "trained" for at in e[4] if at % 8 >= 4}
        assert between and taken and not between & taken
    assert apart(weights(tmp_path, "overlapped"), weights(tmp_path, "apart")) < 1e-6
    assert is_replayed(results(tmp_path, "both")[0])


@pytest.mark.slow
@pytest.mark.engine
def test_without_memory_between_two_steps_the_groups_are_trained_with_the_others(
    compared: Path, tiny_model: Path, tmp_path: Path
) -> None:
    done = start(tiny_model, tmp_path, "memory", ranks=1)
    assert done.returncode == 0, done.stderr[-3000:]
    early = [step["train/early_tokens"] for step in results(tmp_path, "memory")[0]["overlapped"]["steps"]]
    assert early[0] > 0 and early[1] == 0 and early[2] > 0
    assert apart(weights(tmp_path, "overlapped"), weights(compared, "apart")) < 1e-6


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("mode", ["lora", "experts", "host"])
def test_it_is_so_for(mode: str, tiny_model: Path, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model", "qwen3_moe") if mode == "experts" else tiny_model
    done = start(model, tmp_path, mode, ranks=1)
    assert done.returncode == 0, done.stderr[-3000:]
    (rank,) = results(tmp_path, mode)
    assert all(step["train/early_tokens"] > 0 for step in rank["overlapped"]["steps"])
    assert apart(weights(tmp_path, "overlapped"), weights(tmp_path, "apart")) < 1e-6
    assert is_replayed(rank)


# -- what is trained when


def group(position: int, *lengths: int) -> ScoredGroup:
    """Of prompts of 2 tokens."""
    rollouts = tuple(
        Rollout((1, 2), [5] * n, torch.zeros(n), torch.ones(n).bool(), FinishReason.STOP, 0) for n in lengths
    )
    return ScoredGroup(
        Group({"row": position}, rollouts, position), torch.zeros(len(lengths), 1), torch.ones(len(lengths))
    )


class Trained:
    """A `BesideDecoding` that notes the tokens of what it trains."""

    def __init__(self, budget: int = 20) -> None:
        self.rows: list[int] = []
        self.dropped = self.arrived = 0
        self.loss, self.fails_at, self.budget = 1.0, -1, budget
        self.groups = OwnGroups(lambda scored: True)
        self.groups.begin(range(10))
        given = self._train, self._drop, self._arrive, CPU
        self.beside = BesideDecoding(lambda groups: plan_rows(groups, budget, False, CPU), *given)
        self.after_step(running=16, waiting=3)

    def _train(self, rows: Sequence[PackedRow], metrics: Any, losses: list[torch.Tensor]) -> Sequence[PackedRow]:
        if len(self.rows) == self.fails_at:
            raise torch.OutOfMemoryError("no room")
        self.rows += [row.num_tokens for row in rows]
        losses.append(torch.tensor(self.loss))
        return rows

    def _drop(self) -> None:
        self.dropped += 1

    def _arrive(self) -> None:
        self.arrived += 1

    def after_step(self, running: int, waiting: int = 0) -> list[int]:
        """Tokens of each micro-batch so far."""
        self.beside.after_step(self.groups, Load(running, waiting, 0.5), self.budget)
        return self.rows


def test_a_micro_batch_per_step_of_the_tail_if_there_is_a_whole_one() -> None:
    trained = Trained()
    for position in range(4):
        trained.groups.add(group(position, 3, 4))  # 9 tokens
    assert trained.after_step(running=5) == trained.after_step(running=4, waiting=1) == trained.after_step(0) == []
    assert trained.after_step(running=4) == [18]
    assert trained.after_step(running=3) == [18], "two groups are left, which aren't a whole one"
    trained.groups.add(group(4, 3, 4))
    assert trained.after_step(running=1) == [18, 18]
    early = trained.beside.end(0)
    assert [scored.group.position for scored in early.groups] == [0, 1, 2, 3] and len(early.rows) == 2
    trained.beside.begin()
    assert trained.after_step(running=1) == [18, 18] and not trained.beside.early.groups, "the next round's tail"


def test_a_group_of_several_micro_batches_is_trained_step_by_step_and_ends_with_the_sampling() -> None:
    trained = Trained()
    trained.groups.add(group(0, 15, 14, 13))
    assert trained.after_step(running=2) == [17] and trained.after_step(running=2) == [17, 16]
    assert len(trained.beside.end(0).rows) == 3 and trained.rows == [17, 16, 15]


def test_groups_are_left_to_a_rank_that_has_nothing_else_to_do() -> None:
    trained = Trained()
    trained.groups.add(group(0, 15, 14, 13))
    trained.groups.is_wanted = True
    assert trained.after_step(running=1) == []


def test_a_device_that_is_busy_gets_nothing_more_and_is_never_waited_for_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    is_done = [False]
    event = SimpleNamespace(
        record=lambda: calls.append("record"),
        query=lambda: calls.append("query") or is_done[0],
        synchronize=lambda: calls.append("wait") or is_done.__setitem__(0, True),
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    trained = Trained()
    trained.beside.device = torch.device("cuda", 0)
    trained.groups.add(group(0, 15, 14, 13))
    assert trained.after_step(running=1) == trained.after_step(running=1) == [17] and not trained.arrived
    is_done[0] = True
    assert trained.after_step(running=1) == [17, 16] and trained.arrived == 1
    is_done[0] = False
    assert calls == ["record", "query", "query", "record"]
    trained.beside.wait()
    assert trained.arrived == 2 and trained.beside.early.rows


def test_without_memory_nothing_more_is_trained_and_no_gradient_stays() -> None:
    trained = Trained()
    trained.fails_at = 1
    trained.groups.add(group(0, 15, 14, 13))
    for _ in range(3):
        assert trained.after_step(running=1) == [17]
    early = trained.beside.end(0)
    assert early.out_of_memory and trained.dropped == 1 and len(early.groups) == 1


def test_a_loss_that_isn_t_finite_is_said_when_all_is_sampled() -> None:
    trained = Trained()
    trained.loss = float("nan")
    trained.groups.add(group(0, 18))
    assert trained.after_step(running=1) == [20]
    with pytest.raises(FloatingPointError, match="The loss of step 4, micro-batch 0 is nan"):
        trained.beside.end(3)


def test_its_seconds_are_the_training_s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    times, waits = PhaseTimes(synchronize=True), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    with times.phase("generate"):
        with times.inside("generate"), times.phase("train"):
            assert len(waits) == 1, "the device is waited for at the start of the outer phase alone"
    assert times.seconds == {"generate": 2.0, "train": 1.0} and len(waits) == 2


# -- which runs do it


def planned(changes: dict[str, Any]) -> Any:
    given = dict.fromkeys(("on_cpu", "vllm_enable_sleep_mode", "router_replay"), False)
    given |= {"vllm_tensor_parallel_size": 1, "reward_call": "group"} | changes
    why: Any = GRPOConfig.why_not_between_steps
    sizes = {"overlap": "auto", "world_size": 1, "round_length": 1, "balance_ranks": True}
    return SimpleNamespace(**sizes, why_not_between_steps=why.fget(SimpleNamespace(**given)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"on_cpu": True}, "on a CPU decoding takes all of the rank's cores"),
        ({"vllm_enable_sleep_mode": True}, "the KV cache and a micro-batch's activations take turns"),
        ({"vllm_tensor_parallel_size": 2}, "the ranks of an engine step together"),
        ({"router_replay": True}, "with router_replay"),
        ({"reward_call": "all"}, "with reward_call: all"),
    ],
)
def test_the_start_says_what_is_trained_between_steps_or_why_nothing_is(changes: dict[str, Any], reason: str) -> None:
    config = planned(changes)
    assert (reason in describe(config, "")) and ("nothing is trained" in describe(config, "")) == bool(reason)
    assert (finished_groups(config, "", bool) is None) == bool(reason)
    assert finished_groups(config, "a reason", bool) is None
    assert "before all groups are sampled, as a reason" in describe(config, "a reason")
    assert "more sequences may come at any time" in describe(planned({}), "", submits_later=True)


def test_on_a_cpu_a_run_says_that_nothing_is(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, overlap="auto")
    assert "as on a CPU decoding takes all" in describe(config, "") and finished_groups(config, "", bool) is None
