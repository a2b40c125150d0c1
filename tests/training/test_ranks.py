"""Several ranks on one machine (gloo), each with an engine of its own."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import launcher
import pytest
import tiny
from needs import needs
from paths import SCRIPTS

pytestmark = pytest.mark.engine

SCRIPT = SCRIPTS / "two_ranks.py"


def start(ranks: int, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    return launcher.run(script, *arguments, ranks=ranks)


def results(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder_of_two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    done = start(2, str(tiny_model), str(folder / "run"), str(folder), "float32", "exchange")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "run" / "checkpoint-3" / "trainer_state.json").exists()
    assert {p.name for p in (folder / "run" / "checkpoint-3").glob("rng_state_*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    return folder


@pytest.fixture(scope="module")
def two(folder_of_two: Path) -> list[dict]:
    return results(folder_of_two, 2)


@needs("recording")
def test_the_main_process_records_what_all_ranks_did(folder_of_two: Path, two: list[dict]) -> None:
    from shown_rows import samples_of

    from colograd.extensions.recording.event_log import events_of

    events = events_of(folder_of_two / "run")
    kinds = {
        kind: [event for event in events if event["kind"] == kind] for kind in ("start", "rollout", "groups", "end")
    }
    assert kinds["start"][0]["run"]["ranks"] == 2 and [event["status"] for event in kinds["end"]] == ["finished"]
    assert [(event["step"], event["rank"]) for event in kinds["rollout"]] == [(s, r) for s in (1, 2, 3) for r in (0, 1)]
    assert all(max(n for _, n in event["running"]) == 8 and len(event["rewards"]) == 2 for event in kinds["rollout"])
    for number, event in enumerate(kinds["groups"]):
        positions = [position for rank in two for position in rank["seen"][number]["completions"]]
        assert [row[1] for row in event["groups"]] == sorted(map(int, positions))
    samples = [sample for sample in samples_of(folder_of_two / "run") if sample["purpose"] == "train"]
    mine = {int(position) for step in two[0]["seen"][:3] for position in step["completions"]}
    assert samples and {sample["position"] for sample in samples} <= mine
    assert any(sample["trainer"] for sample in samples)


def test_every_publish_leaves_each_engine_with_its_policys_weights(two) -> None:
    for rank in two:
        assert [step["version"] for step in rank["seen"]][:4] == [0, 1, 2, 3]
        assert all(step["differing"] == [] for step in rank["seen"])


def test_ranks_hold_identical_weights_after_each_step(two, tried) -> None:
    first, second = ([step["weights"] for step in rank["seen"]] for rank in two)
    assert first == second and len(set(first[:4])) == 4
    tried("llama", "two_ranks")


def test_ranks_hold_identical_references_that_follow_every_second_step(two) -> None:
    first, second = ([step["reference"] for step in rank["seen"]] for rank in two)
    assert first == second and [a == b for a, b in itertools.pairwise(first[:4])] == [True, False, True]
    assert first[0] == two[0]["seen"][0]["weights"], "what the run began with"


def test_ranks_sample_different_prompts_and_completions(two) -> None:
    for mine, theirs in zip(two[0]["seen"][:3], two[1]["seen"][:3], strict=True):
        assert not mine["completions"].keys() & theirs["completions"].keys()


def test_the_number_of_ranks_changes_neither_rollouts_nor_losses(two, tiny_model, tmp_path) -> None:
    """The same prompts give the same completions on one rank; losses agree to rounding."""
    done = start(1, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "float32", "exchange")
    assert done.returncode == 0, done.stderr[-3000:]
    (one,) = results(tmp_path, 1)
    assert one["seen"][0]["completions"] == two[0]["seen"][0]["completions"] | two[1]["seen"][0]["completions"]
    assert one["losses"] == pytest.approx(two[0]["losses"], abs=1e-5)
    assert one["count"] == two[0]["count"] == 20 and two[0]["eval"] == pytest.approx(one["eval"], abs=1e-3)


@pytest.mark.parametrize("sharding", ["gradients", pytest.param("none", marks=pytest.mark.slow)])
def test_a_bfloat16_policy_with_its_split_master_stays_identical(tiny_model, tmp_path, sharding) -> None:
    done = start(2, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "bfloat16", "", sharding)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = results(tmp_path, 2)
    assert [s["weights"] for s in first["seen"]] == [s["weights"] for s in second["seen"]]
    assert all(step["differing"] == [] for rank in (first, second) for step in rank["seen"])
    written = {path.name for path in (tmp_path / "run" / "checkpoint-3").glob("optimizer*")}
    parts = {f"optimizer-0000{rank}-of-00002.safetensors" for rank in range(2)}
    assert written == ({"optimizer-00000-of-00001.safetensors"} if sharding == "none" else parts)


@pytest.mark.slow  # test_sharding.py has the bits of each way without an engine
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_sharding_changes_no_bit_of_a_run(two, tiny_model, tmp_path, sharding) -> None:
    """The optimizer gathers the weights, and no further bytes are published."""
    done = start(2, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "float32", "exchange", sharding)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, expected in zip(results(tmp_path, 2), two, strict=True):
        assert rank["seen"] == expected["seen"] and rank["losses"] == expected["losses"]
        assert rank["traffic"]["gathered"] == [rank["bytes"]] * 3
        assert rank["traffic"]["reduced"] == expected["traffic"]["reduced"] == [rank["bytes"]] * 3
        assert rank["shared"] and rank["traffic"]["published"] == [0, 0, 0]


@pytest.mark.slow  # test_fsdp.py has the bits without an engine
def test_fsdp_trains_and_publishes_bit_equal_weights(two, tiny_model, tmp_path) -> None:
    """Compared up to the second step, because the other run's reference then follows its policy, which FSDP can't."""
    done = start(2, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "float32", "reference", "fsdp")
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, expected in zip(results(tmp_path, 2), two, strict=True):
        assert rank["seen"][:2] == expected["seen"][:2] and rank["losses"][:2] == expected["losses"][:2]
        assert rank["seen"][2]["weights"] == expected["seen"][2]["weights"]
        assert all(step["differing"] == [] for step in rank["seen"])
        assert rank["traffic"]["published"] == rank["traffic"]["reduced"] == [rank["bytes"]] * 3
    written = {path.name for path in (tmp_path / "run" / "checkpoint-3").glob("optimizer*")}
    assert written == {f"optimizer-0000{rank}-of-00002.safetensors" for rank in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp_checkpoints_resume_bit_equal_across_sharding_modes(tiny_qwen, tmp_path, dtype, tried) -> None:
    tried("qwen2", "two_ranks")

    def final(folder: str, steps: int, sharding: str) -> bytes:
        arguments = (tiny_qwen, tmp_path / folder, tmp_path / folder, dtype, steps, sharding)
        done = start(2, *map(str, arguments), script=SCRIPT.with_name("resumed_ranks.py"))
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads((tmp_path / f"{folder}-rank1.json").read_text())
        assert found["differing"] == []
        assert dtype == "bfloat16" or found["mismatch"] < 1e-5, "of the sampler and the trainer, in nats"
        return (tmp_path / folder / "final" / "model.safetensors").read_bytes()

    expected = final("straight", 4, "gradients")
    final("rows", 2, "fsdp")
    shutil.copytree(tmp_path / "rows", tmp_path / "crossed")
    shutil.copytree(tmp_path / "straight" / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    assert final("rows", 4, "fsdp") == expected
    assert final("crossed", 4, "gradients") == expected
    assert final("other", 4, "fsdp") == expected


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reward", "Rank 1 failed in the rollout: RewardError: .*the judge of rank 1 is out"),
        # test_watchdog.py tests ranks without progress, test_trainer.py the run's limit.
        pytest.param(
            "never",
            r"Rank 1 made no progress for 1\d s \(rank_timeout\) in reward function 'reward': it is in reward "
            r"\(two_ranks.py:\d+\), called by _begin_call",
            marks=pytest.mark.slow,
        ),
        # The slow two take the same way to all ranks as the first; test_reward_workers.py has them on one rank.
        pytest.param(
            "dies",
            r"Rank 1 failed in the rollout: RewardError: .*'reward'.* function's worker process ended with status 9",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stuck",
            r"Rank 1 failed in the rollout: RewardError: .*'reward'.* gave no answer within reward_timeout \(5 s\)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "loss",
            r"Rank 1 failed in training: FloatingPointError: The loss of step 2, micro-batch 1 is nan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "loss gradients",
            r"Rank 1 failed in training: FloatingPointError: The loss of step 2, micro-batch 1 is nan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "loss fsdp",
            r"Rank 1 failed in training: FloatingPointError: The loss of step 2, micro-batch 1 is nan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "backward gradients",  # in the middle of the ranks' exchanges
            r"Rank 1 failed in training: RuntimeError: a kernel of rank 1 failed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failure_on_one_rank_ends_all_ranks_with_its_message(tiny_model, tmp_path, fault, said) -> None:
    import re

    done = start(2, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "float32", *fault.split())
    assert done.returncode != 0
    assert re.search(said, done.stderr, re.DOTALL), done.stderr[-3000:]
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow  # on one rank: test_reward_workers.py; abstentions on two ranks: test_reward_faults.py
def test_a_reward_hanging_on_one_rank_abstains_there(tiny_model, tmp_path) -> None:
    done = start(2, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "float32", "hangs")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = results(tmp_path, 2)
    assert first["timeouts"] == [2], "two groups of rank 1 in its one step, counted for all"
    assert first["abstained"] == [8]
    assert [s["weights"] for s in first["seen"]] == [s["weights"] for s in second["seen"]]


@pytest.mark.slow  # test_token_budget.py has it on one rank
@pytest.mark.parametrize("sharding", ["gradients", "none"])
def test_all_ranks_repeat_an_out_of_memory_step(two, tiny_model, tmp_path, sharding) -> None:
    """Memory runs out on one rank only. Losses equal a fault-free run's."""
    done = start(2, str(tiny_model), str(tmp_path / "run"), str(tmp_path), "float32", "memory", sharding)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memory: step 1 ran out of memory and is repeated" in done.stdout
    first, second = results(tmp_path, 2)
    assert [s["weights"] for s in first["seen"]] == [s["weights"] for s in second["seen"]]
    assert first["losses"] == pytest.approx(two[0]["losses"], abs=1e-5)


def test_a_launcher_that_starts_fewer_ranks_than_asked_is_found_out(tiny_model, tmp_path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*launcher, "-m", "colograd.train", "--model_name_or_path", str(tiny_model), "--reward_funcs", "last_number"],
        capture_output=True, text=True, timeout=tiny.PATIENCE, env=tiny.clean_environment(),
    )  # fmt: skip
    assert done.returncode != 0
    assert "several ranks were requested, but only one was started" in done.stderr and "torchrun" in done.stderr
