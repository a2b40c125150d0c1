"""SIGKILL at any moment: the resumed run goes on from the last whole checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "scripts" / "record.py"


def run(model: Path, run_dir: Path, record: Path, kill_at: str = "never") -> int:
    command = [sys.executable, str(SCRIPT), str(model), str(run_dir), str(record), kill_at]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=tiny.clean_environment())
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def steps(record: Path) -> dict[int, dict]:
    """step -> what was recorded of it, the last time it was taken."""
    return {line["step"]: line for line in map(json.loads, record.read_text().splitlines())}


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict], bytes]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(tiny_model, folder / "run", folder / "record.jsonl") == 0
    return steps(folder / "record.jsonl"), (folder / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("moment", "resumes_from"),
    [("rollout:4", 2), ("model:4", 2), ("rename:4", 2), ("renamed:4", 4)]
    + [pytest.param("backward:5", 4, marks=pytest.mark.slow), pytest.param("rollout:1", 0, marks=pytest.mark.slow)],
)
def test_a_killed_run_resumes_bit_for_bit(tiny_model, tmp_path, uninterrupted, moment, resumes_from) -> None:
    """Same completions, bit-equal losses, the same learning rates and the same final weights."""
    run_dir, record = tmp_path / "run", tmp_path / "record.jsonl"
    assert run(tiny_model, run_dir, record, moment) == -signal.SIGKILL
    whole = sorted(int(path.name.rpartition("-")[2]) for path in run_dir.glob("checkpoint-*"))
    assert max(whole, default=0) == resumes_from, "only whole checkpoints are there"
    taken = len(record.read_text().splitlines()) if record.exists() else 0
    assert run(tiny_model, run_dir, record) == 0
    resumed = [json.loads(line)["step"] for line in record.read_text().splitlines()[taken:]]
    assert resumed == list(range(resumes_from + 1, 7))
    expected, weights = uninterrupted
    assert steps(record) == expected
    assert (run_dir / "model.safetensors").read_bytes() == weights
    assert not list(run_dir.glob(".*")), "what the kill left behind is swept up"
