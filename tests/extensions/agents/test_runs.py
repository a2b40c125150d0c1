"""Runs with an agent from their start to their end: killed and resumed, and two ranks with failing sessions."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import launcher
import pytest
import tiny
from paths import SCRIPTS

from colograd.rollout.record_file import read_records

SCRIPT, FAULTS = SCRIPTS / "agent_ranks.py", SCRIPTS / "agent_faults.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model") / "model")


def run(model: Path, folder: Path, ranks: int = 0, fails: bool = False, **settings: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    done = launcher.run(SCRIPT, model, folder, json.dumps(settings), ranks=ranks)
    if fails:
        assert done.returncode != 0, done.stdout[-2000:]
        return {}
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "rank0.json").read_text())
    return found


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(model: Path, tmp_path: Path) -> None:
    """Finished sessions aren't run again. The loss ignores the sampler's log-probabilities, because their last bits
    depend on the engine's batch. So equal completions make equal weights."""
    shape = {"num_generations": 8, "agent_sessions": 32, "resume_from_checkpoint": "auto", "journal": "keep"}
    shape["vllm_importance_sampling_correction"] = False
    killed, die_after = tmp_path / "killed", random.randint(13, 30)
    print("killed when this many sessions had ended:", die_after)
    run(model, killed, fails=True, die_after=die_after, **shape)
    (log,) = (killed / "run" / "_journal").glob("step-*/rank-*.sessions")
    recorded = len([*read_records(log)]) - 1
    assert recorded >= 1
    before = len((killed / "ended.txt").read_text().splitlines())
    again = run(model, killed, **shape)
    assert len(again["log"]) == 2
    after = len((killed / "ended.txt").read_text().splitlines()) - before
    assert after == 2 * 32 - recorded, "only sessions that weren't recorded were run"
    whole = run(model, tmp_path / "whole", **shape)
    assert again["weights"] == whole["weights"]
    assert all(entry["grad_norm"] > 0 for entry in whole["log"])


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["an engine each", "one engine"])
def test_two_ranks_and_sessions_that_fail_in_all_ways(model: Path, tmp_path: Path, shared: bool) -> None:
    settings = {"vllm_tensor_parallel_size": 2} if shared else {}
    done = launcher.run(FAULTS, model, tmp_path, json.dumps(settings), ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert first["step"] == second["step"] == 2 and first["weights"] == second["weights"]
    failures = sum(entry.get("agent/failures", 0) for entry in first["log"])
    abstained = sum(entry["rewards/agent_reward/abstained"] for entry in first["log"])
    assert failures == abstained == 12 and first["log"][0]["agent/timeouts"] == 4

    # The last step's agent_on_error is `raise`.
    ended = re.compile(r"prompt \d+, session \d: its command ended with status 1\..*it can't go on", re.DOTALL)
    for rank in ranks:
        assert ended.search(rank["error"]), rank["error"]

    def of(kind: str) -> list[dict[str, Any]]:
        found = [each for rank in ranks for each in rank["sessions"] if each["kind"] == kind and each["row"] < 8]
        assert len(found) >= 4, kind
        return found

    assert all("agent_timeout (100000 s)" in each["failure"] for each in of("hangs"))
    assert all("status -9" in each["failure"] for each in of("dies"))
    assert all("it can't go on" in each["failure"] for each in of("exits"))
    for kind in ("fine", "floods", "rubbish", "late"):
        for each in of(kind):
            assert each["failure"] == "" and each["reward"] == 1.0, f"{each} wasn't answered as it should"
    assert [each["answers"] for each in of("fine")] == [1] * 8
    assert all(each["sampled"] > 0 for each in of("fine") + of("hangs") + of("dies"))
