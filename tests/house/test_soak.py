"""A run that is killed at any moment loses nothing: the short form of tests/soak/kill.py, and torchrun's restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
from paths import TESTS

sys.path.insert(0, str(TESTS / "soak"))

import kill

pytestmark = pytest.mark.engine


@pytest.mark.slow  # test_resume.py has one kill, at a rename
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_moment_nothing_is_lost_or_paid_for_twice(ranks: int) -> None:
    assert kill.soak(4, seed=ranks, ranks=ranks)["kills"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_stops_end_in_time_and_lose_nothing(ranks: int) -> None:
    assert kill.stops(12, seed=ranks, ranks=ranks)["stops"] == 12


@pytest.mark.slow  # tests/parallel/test_faults.py has what is special about it
def test_torchrun_starts_a_killed_group_of_ranks_anew(tiny_model: Path, tmp_path: Path) -> None:
    """`--max-restarts`: the second attempt meets in the store of the first, and goes on from checkpoint and journal."""
    kills = [{"victim": 1, "event": 90}]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(kill.PROGRAM), str(tiny_model), str(tmp_path / "run"), json.dumps(kills)]
    environment = tiny.clean_environment() | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=tiny.PATIENCE, env=environment)
    assert done.returncode == 0 and done.stdout.count("the run has ended") == 2, done.stderr[-4000:]
    assert "exitcode: -9" in done.stderr, done.stderr[-4000:]  # it was killed
    assert kill.start(tiny_model, tmp_path / "whole", 2, None)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_takes_up_what_was_recorded(
    before: int, after: int, tiny_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert not kill.start(tiny_model, run, before, {"victim": -1 if before > 1 else 0, "event": 100})
    safe, sampled = kill.recorded(run), Counter(kill.told(run, "sampled"))
    newest = max(step for step, _ in safe)
    assert newest > 0, "killed before there was anything to go on from"
    assert kill.start(tiny_model, run, after, None)
    assert not safe & set(Counter(kill.told(run, "sampled")) - sampled)
    assert len(set(kill.told(run, "scored"))) == kill.PROMPTS * kill.STEPS == len(kill.told(run, "scored"))
