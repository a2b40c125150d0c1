"""An engine that several ranks share: one leads, the others follow, whatever a clock or one rank's state decides.

Each case of scripts/shared_engine.py ends on both ranks, after as many steps of both engines; afterwards both ranks
sample the same tokens without a leader, so the engines agree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from engine_ranks import results, start
from needs import has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("models") / "talker", context=1024)


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Reports of the two ranks of an engine."""
    folder = tmp_path_factory.mktemp("shared")
    done = start("shared_engine.py", 2, model, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return results(folder, 2)


CASES = (
    "plain", "closed_early", "closed_by_the_clock", "left_open", "late_reward", "vllm_itself",
    *(("tools", "late_tools") if has("tools") else ()),
)  # fmt: skip
BY_THE_CLOCK = ("closed_by_the_clock", "late_tools")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_one_engine_stay_in_step(ranks: list[dict], case: str) -> None:
    leader, follower = (rank[case] for rank in ranks)
    assert leader["steps"] == follower["steps"] > 0
    assert leader["after"] == follower["after"]
    if case == "left_open":
        assert leader["error"] == "RuntimeError: the judge is out"
        assert follower["error"] == "RankError: Rank 0 failed in the case left_open: RuntimeError: the judge is out"
    else:
        assert follower["tokens"] is None and leader["tokens"]


@pytest.mark.slow
@pytest.mark.engine
def test_what_is_closed_early_is_aborted_on_both(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["closed_early"]["steps"] < rank["plain"]["steps"]
        assert rank["left_open"]["steps"] < rank["plain"]["steps"]


@pytest.mark.slow
@pytest.mark.engine
def test_rewards_are_computed_by_the_leader_alone(ranks: list[dict]) -> None:
    assert ranks[0]["called"] >= 4 and ranks[1]["called"] == 0


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("size", [1, 4])
def test_an_engine_of_one_rank_or_of_four_samples_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    """Only cases without a clock are compared."""
    model = tiny.make_model(tmp_path_factory.mktemp("models") / "wide", context=1024, heads=4, keys=2)
    for number in (2, size):
        done = start("shared_engine.py", number, model, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    two, other = (results(tmp_path, number)[0] for number in (2, size))
    for case in {*CASES} - {*BY_THE_CLOCK}:
        assert two[case].get("tokens") == other[case].get("tokens") and two[case]["after"] == other[case]["after"]


@pytest.mark.engine
@pytest.mark.parametrize("fault", ["follower", pytest.param("leader", marks=pytest.mark.slow)])
def test_a_rank_that_fails_in_a_step_ends_all_with_its_message(model: Path, tmp_path: Path, fault: str) -> None:
    done = start("shared_engine.py", 2, model, tmp_path, fault)
    rank = 0 if fault == "leader" else 1
    assert done.returncode != 0
    told = f"Rank {rank} failed in a step of the engine: OutOfMemoryError: no room on rank {rank}"
    assert f"colograd: error: {told}" in done.stderr, done.stderr[-3000:]
