"""A few of the engine's tests with vLLM's GPU model runner. `make test-v2` runs all tests with it."""

from __future__ import annotations

import subprocess
import sys

import model_runner_v2
import tiny


def test_a_small_part_passes_with_vllm_s_gpu_model_runner() -> None:
    """The selected tests cover log-probabilities and asynchronous scheduling."""
    command = [sys.executable, model_runner_v2.__file__, "--small", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.clean_environment())
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "skipped" not in done.stdout.splitlines()[-1]
