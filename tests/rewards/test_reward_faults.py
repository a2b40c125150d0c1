"""A reward that goes wrong on one rank of two: the documented end, on both, within its deadline. No rank hangs.

Rewards that raise, hang, or end their process are in tests/training/test_ranks.py: they end the launcher's processes.
Tests on one rank: tests/training/test_trainer.py (raises), test_reward_workers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import launcher
import pytest
from paths import SCRIPTS

pytestmark = pytest.mark.engine

SCRIPT = SCRIPTS / "reward_faults.py"
REFUSED = {
    "nothing": "it returned None (NoneType), but a reward function must return a list of 4 numbers",
    "nan": "its reward is nan (float), but a reward must be a finite float32 number or None",
    "text": "its reward is 'good' (str), but a reward must be a finite float32 number or None",
    "length": "it returned 5 rewards for 4 completions",
}
TAKEN = ("abstain", "megabyte", "alarm")


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """{case: each rank's end}. All cases run one after the other in one pair of processes."""
    folder = tmp_path_factory.mktemp("faults")
    done = launcher.run(SCRIPT, tiny_model, folder / "run", folder, *REFUSED, *TAKEN, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "x" * 2**20 in done.stderr, "what a reward prints is seen"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_rewards_end_the_step_on_both_ranks(ranks, case: str) -> None:
    """Weights stay as they were."""
    mine, theirs = (rank[case] for rank in ranks)
    assert theirs["problem"].startswith("RewardError: reward function 'faulty', prompt ")
    assert REFUSED[case] in theirs["problem"]
    assert mine["problem"] == f"RankError: Rank 1 failed in the rollout: {theirs['problem']}"
    for end in (mine, theirs):
        assert end["weights"] == end["before"] and end["seconds"] < 60


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_a_reward_trains_both_ranks_alike(ranks, case: str) -> None:
    mine, theirs = (rank[case] for rank in ranks)
    assert not mine["problem"] and not theirs["problem"]
    assert mine["weights"] == theirs["weights"] != mine["before"] == theirs["before"]
    assert mine["metrics"]["rewards/faulty/abstained"] == (8 if case == "abstain" else 0)
    assert not [name for name in mine["metrics"] if "timeouts" in name or "errors" in name]
    assert max(mine["seconds"], theirs["seconds"]) < 60
