"""An engine that several ranks share: one leads, the others follow, whatever a clock or one rank's state decides.

Each case of scripts/shared_engine.py ends on both ranks, after as many steps of both engines; what both sample then,
without a leader, is the same, so the engines agree. Where no clock decides, it is what an engine of one rank samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from colograd.runtime import process

SCRIPTS = Path(__file__).parent / "scripts"


def start(script: str, ranks: int, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(process.free_port()), str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=tiny.clean_environment())


def results(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"rank{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("models") / "talker", context=1024)


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Two ranks of one engine, and one of its own."""
    folder = tmp_path_factory.mktemp("shared")
    for size in (2, 1):
        done = start("shared_engine.py", size, model, folder)
        assert done.returncode == 0, done.stderr[-3000:]
    return [*results(folder, 2), *results(folder, 1)]


CASES = (
    "plain", "closed_early", "closed_by_the_clock", "left_open", "late_reward", "tools", "late_tools", "vllm_itself",
)  # fmt: skip
BY_THE_CLOCK = ("closed_by_the_clock", "late_tools")


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_one_engine_stay_in_step(ranks: list[dict], case: str) -> None:
    leader, follower, alone = (rank[case] for rank in ranks)
    assert leader["steps"] == follower["steps"] > 0
    assert leader["after"] == follower["after"] == alone["after"]
    if case == "left_open":
        assert leader["error"] == "RuntimeError: the judge is out"
        assert follower["error"] == "RankError: Rank 0 failed in the case left_open: RuntimeError: the judge is out"
        return
    assert follower["tokens"] is None and leader["tokens"]
    if case not in BY_THE_CLOCK:
        assert leader["tokens"] == alone["tokens"]


@pytest.mark.engine
def test_rewards_are_computed_by_the_leader_alone(ranks: list[dict]) -> None:
    leader, follower, alone = (rank["called"] for rank in ranks)
    assert leader >= 4 and follower == 0 and alone >= 4


@pytest.mark.engine
def test_a_follower_that_fails_in_a_step_ends_all_ranks_with_its_message(model: Path, tmp_path: Path) -> None:
    done = start("shared_engine.py", 2, model, tmp_path, "follower", timeout=120)
    assert done.returncode != 0
    told = "Rank 1 failed in a step of the engine: OutOfMemoryError: no room on the last rank"
    assert f"colograd: error: {told}" in done.stderr, done.stderr[-3000:]
    assert "torch.OutOfMemoryError: no room on the last rank" in done.stderr
