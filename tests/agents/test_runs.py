"""Runs with an agent from their start to their end: killed and resumed, and on two ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import launcher
import pytest
import tiny
from paths import SCRIPTS

from colograd.rollout.record_file import read_records

SCRIPT = SCRIPTS / "agent_ranks.py"


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
    """And finished sessions aren't run again. The sampler's log-probabilities, whose last bits depend on what else was
    in the engine's batch, stay out of the loss; then equal answers make equal weights."""
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
def test_two_ranks_and_a_failing_session(model: Path, tmp_path: Path, shared: bool) -> None:
    settings: dict[str, Any] = {"agent_on_error": "abstain"}
    if shared:
        settings["vllm_tensor_parallel_size"] = 2
    found = run(model, tmp_path / "two", ranks=2, **settings)
    assert len(found["log"]) == 2
    failures = sum(entry.get("agent/failures", 0) for entry in found["log"])
    assert failures == 4, "the sessions of row 3"
    assert sum(entry["rewards/agent_reward/abstained"] for entry in found["log"]) == 4
