"""`overlap: auto`: ranks train finished groups while others still sample, and nothing but time is different."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import row_cases
import tiny
import torch
from overlapping import STEPS, apart, check_resumed, is_replayed, results, start, weights

from colograd.apps.report.recorded_run import RecordedRun
from colograd.config import GRPOConfig
from colograd.extensions.overlap.rounds import first_rows, note, why_not
from colograd.extensions.recording.event_log import events_of
from colograd.losses.advantages import AdvantageEstimator
from colograd.losses.objective import Objective
from colograd.policy.packing import PackingRules


@pytest.fixture(scope="module")
def compared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    done = start(tiny_model, folder, "compare")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "overlap: a rank that has sampled trains its groups, and finished ones of other ranks" in done.stdout
    return folder


@pytest.mark.engine
def test_a_rank_trains_groups_of_another_that_still_samples(compared: Path) -> None:
    first, second = (rank["overlapped"] for rank in results(compared, "compare"))
    for step in range(STEPS):
        mine, theirs = ([e for e in events if e[2] == step] for events in (first["events"], second["events"]))
        sampled = {position for event in theirs if event[3] == "sampled" for position in event[4]}
        last = max(event[0] for event in theirs if event[3] == "sampled")
        early = [event for event in mine if event[3] == "trained" and event[0] < last]
        assert any(sampled & {*event[4]} for event in early), "before the second rank's last group was sampled"
        counted = first["steps"][step]
        assert 0 < counted["train/early_tokens"] <= counted["train/packed_tokens"] and counted["train/moved_groups"] > 0
        assert 0 < counted["rollout/idle_share"] < 1


@pytest.mark.engine
def test_report_shows_early_training_and_sampling_end(compared: Path) -> None:
    run, first = compared / "overlapped", results(compared, "compare")[0]["overlapped"]
    found = [event for event in events_of(run) if event["kind"] == "rollout"]
    lanes, others = ([event for event in found if event["rank"] == rank] for rank in range(2))
    assert len(lanes) == STEPS
    for lane, other, step in zip(lanes, others, first["steps"], strict=True):
        # The second rank may train its last group, if the first is amid a micro-batch.
        assert sum(tokens for *_, tokens in lane["trained"] + other["trained"]) == step["train/early_tokens"]
        for each in lane, other:
            assert all(each["seconds"] - 0.01 <= start <= end <= each["until"] for _, start, end, _ in each["trained"])
    shown = RecordedRun(run)
    shown.refresh()
    shown_lanes = [(rank, lane) for step in range(STEPS) for rank, lane in shown.rollouts[step + 1].items()]
    assert len(shown_lanes) == 2 * STEPS and all(
        json.loads(zlib.decompress(lane))["trained"] or rank for rank, lane in shown_lanes
    )


@pytest.mark.engine
def test_the_update_is_the_same_up_to_rounding(compared: Path) -> None:
    first = results(compared, "compare")[0]
    for mine, theirs in zip(first["overlapped"]["steps"], first["apart"]["steps"], strict=True):
        assert "train/early_tokens" not in theirs
        for name in ("loss", "grad_norm", "kl", "entropy", "completions/mean_length", "reward"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    assert apart(weights(compared, "overlapped"), weights(compared, "apart")) < 1e-6


@pytest.mark.engine
def test_a_replay_trains_the_same_micro_batches_to_the_same_bits(compared: Path) -> None:
    """A replay doesn't overlap, because it samples nothing."""
    for rank in results(compared, "compare"):
        assert all(partition and partition[0] for partition in rank["overlapped"]["partition"])
    assert is_replayed(results(compared, "compare")[0])


@pytest.mark.slow
@pytest.mark.engine
def test_killed_amid_an_overlapped_step_nothing_is_lost(compared: Path, tiny_model: Path, tmp_path: Path) -> None:
    done = start(tiny_model, tmp_path, "kill")
    assert done.returncode and "Rank 0 ended without a word" in done.stderr, done.stderr[-3000:]
    check_resumed(tiny_model, tmp_path, "resume")
    assert apart(weights(tmp_path, "overlapped"), weights(compared, "apart")) < 1e-6


@pytest.mark.slow
@pytest.mark.engine
def test_early_micro_batch_without_memory_trains_later(compared: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Trains the micro-batch with the others of its step."""
    done = start(tiny_model, tmp_path, "memory")
    assert done.returncode == 0, done.stderr[-3000:]
    early = [step["train/early_tokens"] for step in results(tmp_path, "memory")[0]["overlapped"]["steps"]]
    assert early[0] > 0 and early[1] == 0 and early[2] > 0
    assert is_replayed(results(tmp_path, "memory")[0])
    assert apart(weights(tmp_path, "overlapped"), weights(compared, "apart")) < 1e-6


@pytest.mark.slow
@pytest.mark.engine
def test_a_reward_that_fails_while_another_rank_trains_ends_both(tiny_model: Path, tmp_path: Path) -> None:
    done = start(tiny_model, tmp_path, "reward")
    assert done.returncode and "the judge of rank 1 is out" in done.stderr
    assert "Rank 1 failed in the rollout" in done.stderr


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("mode", "ranks"), [("optimizer", 2), ("host", 2), ("lora", 2), ("experts", 2), ("engines", 4)]
)
def test_it_is_so_for(mode: str, ranks: int, tiny_model: Path, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model", "qwen3_moe") if mode == "experts" else tiny_model
    done = start(model, tmp_path, mode, ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    first = results(tmp_path, mode)[0]
    assert all(step["train/early_tokens"] > 0 for step in first["overlapped"]["steps"])
    assert apart(weights(tmp_path, "overlapped"), weights(tmp_path, "apart")) < 1e-6
    assert is_replayed(first)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("dynamic", "dynamic_sampling"),
        ("gradients", "sharding: gradients ranks exchange in each backward"),
        ("fsdp", "sharding: fsdp ranks exchange in each backward"),
    ],
)
def test_where_nothing_may_be_trained_early_every_bit_is_as_without(
    mode: str, reason: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The micro-batches are the same, one after the other."""
    done = start(tiny_model, tmp_path, mode)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "overlap: nothing is trained before all ranks have sampled" in done.stdout and reason in done.stdout
    mine, theirs = weights(tmp_path, "overlapped"), weights(tmp_path, "apart")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    first = results(tmp_path, mode)[0]
    assert is_replayed(first) and not any(first["overlapped"]["partition"])


# -- which runs overlap


ALONE = "there is no other rank"


def trainer_of(config: GRPOConfig, replaced: Container[str] = ()) -> Any:
    learner, estimator = SimpleNamespace(objective=Objective.from_config(config)), AdvantageEstimator.of(config, [1.0])
    return SimpleNamespace(args=config, learner=learner, estimator=estimator, replaced=replaced)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ALONE),
        ({"loss_type": "dr_grpo", "beta": 0.1, "num_iterations": 2}, ALONE),
        ({"scale_rewards": "batch"}, "a deviation over the step"),
        ({"dynamic_sampling": True}, "dynamic_sampling chooses"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"entropy_coef": 0.1}, "the entropy's bonus"),
        ({"full_determinism": True}, "full_determinism"),
    ],
)
def test_what_needs_the_whole_step_waits_and_says_so(changes: dict[str, Any], reason: str) -> None:
    assert reason in why_not(trainer_of(tiny.config("nowhere", **changes)))


def test_one_rank_trains_nothing_early(tmp_path: Path) -> None:
    trainer = trainer_of(tiny.config(tmp_path, overlap="auto"))
    assert note(trainer) == f"overlap: nothing is trained before all ranks have sampled, as {ALONE}"


@pytest.mark.parametrize("stage", ["compute_loss", "compute_advantages"])
def test_stages_of_ones_own_wait(stage: str) -> None:
    assert f"a {stage} of your own" in why_not(trainer_of(tiny.config("nowhere"), {stage}))


def test_a_recorded_partition_is_for_ranks_that_train_their_own_rows() -> None:
    """A run without `sequence_parallel_size` may have recorded rows that don't suit ranks that divide rows now."""
    (scored, *_), cpu = row_cases.make_groups(), torch.device("cpu")
    alone = PackingRules(100, False, False, True, False, False, 0.0, cpu)
    recorded = (((scored.group.position,),),)
    found = first_rows([scored], None, recorded, alone)
    assert not found.rest and len(found.early.rows) == 1 and not found.early.trained
    for change in ({"equal_counts": True}, {"ranks_per_row": 2}):
        found = first_rows([scored], None, recorded, dataclasses.replace(alone, **change))
        assert found.rest == [scored] and not found.early.rows


def test_a_recorded_partition_of_other_groups_is_ignored() -> None:
    (scored, *_), cpu = row_cases.make_groups(), torch.device("cpu")
    rules, position = PackingRules(100, False, False, True, False, False, 0.0, cpu), scored.group.position
    for wrong in ((((position, position),),), (((position + 99,),),), (((position,),), ())):
        found = first_rows([scored], None, wrong, rules)
        assert found.rest == [scored] and not found.early.rows and not found.partition


def test_off_is_the_default_and_yaml_s_bare_off_is_it_too(tmp_path: Path) -> None:
    assert tiny.config(tmp_path).overlap == tiny.config(tmp_path, overlap=False).overlap == "off"
    with pytest.raises(ValueError, match="`overlap` 'on' isn't supported: choose one of auto, off"):
        GRPOConfig(output_dir=str(tmp_path), overlap="on")
