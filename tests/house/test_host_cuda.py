"""The trainer's path on a CUDA device in host memory: the branches that only a GPU takes, with values.

What the device enforces and what it can't see: `tests/helpers/host_cuda.py`. One process runs many cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import host_cuda
import native_library
import pytest
from host_cuda_cases import CASES, RANKS
from paths import HELPERS

FAST = ("float32", "all on the host", "lora and teacher")
FAST_RANKS = ("fsdp saved",)
OTHERS = tuple(name for name in CASES if name not in (*FAST, *RANKS))

# Where the host waits for the device in a step. Each wait is small, and none is in a micro-batch or a decoding step.
# "FILE FUNCTION: why".
WAITS = """
"""
LEFT = 2**18  # bytes that caches and the process keep after a trainer has closed
ROUNDING = {"float32": 1e-5, "bfloat16": 0.03}  # nats between sampler and trainer


@pytest.fixture(autouse=True)
def _device() -> None:
    if reason := native_library.why_not():
        pytest.skip(f"no CUDA device in host memory: {reason}")


def check(result: dict[str, Any]) -> None:
    """Expect what holds for every case."""
    assert "error" not in result, result["error"]
    assert not result["races"], result["races"]
    assert not result["differing"], "the engine has the policy's weights"
    assert result["left"] <= LEFT, result["left"]
    dtype = CASES[result["case"]].get("model_init_kwargs", {}).get("dtype", "float32")
    difference = "sampling/sampling_logp_difference/max"
    differences = [step[difference] for step in result["steps"] if difference in step]
    assert len(differences) == 2 and max(differences) < ROUNDING[dtype], differences
    if "save_strategy" in CASES[result["case"]]:
        assert result["resumed"] == 3


def run(folder: Path, *names: str, ranks: int = 1) -> list[dict[str, Any]]:
    results = host_cuda.run(HELPERS / "host_cuda_cases.py", str(folder), *names, ranks=ranks)
    assert len(results) == ranks * len(names)
    return results


def test_device_keeps_the_rules_of_cuda() -> None:
    assert host_cuda.run(HELPERS / "host_cuda_rules.py") == [{"rules": "hold"}]


def test_a_trainer_runs_on_the_device(tmp_path: Path) -> None:
    for result in run(tmp_path, *FAST):
        check(result)


@pytest.mark.slow
def test_ranks_run_on_devices_of_their_own(tmp_path: Path) -> None:
    for result in run(tmp_path, *FAST_RANKS, ranks=2):
        check(result)


@pytest.mark.slow
def test_every_variant_runs_on_the_device(tmp_path: Path) -> None:
    for result in run(tmp_path, *OTHERS):
        check(result)


@pytest.mark.slow
def test_every_sharding_runs_on_the_device(tmp_path: Path) -> None:
    for result in run(tmp_path, *RANKS, ranks=2):
        check(result)
