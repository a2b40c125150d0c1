"""The trainer's path on a CUDA device in host memory: the branches that only a GPU takes, with values.

`tests/helpers/host_cuda.py` describes the device and its limits. One process runs many cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import host_cuda
import native_library
import pytest
from host_cuda_cases import CASES, RANKS, faults
from paths import HELPERS

FAST = ("float32", "all on the host", "lora and teacher")
FAST_RANKS = ("fsdp saved",)
OTHERS = tuple(name for name in CASES if name not in (*FAST, *RANKS))

# Variants that leave the same bits as `bfloat16`. Runs that save train the last step from a checkpoint.
SAME_BITS = ("bfloat16", "budget", "streamed", "sampling", "copied", "saved", "streamed saved", "overlap", "evaluated")
SAME_BITS_ON_RANKS = ("none", "optimizer", "gradients", "fsdp", "gradients on the host", "fsdp saved")
MUTANTS = HELPERS / "host_cuda_mutants.py"


@pytest.fixture(autouse=True)
def _device() -> None:
    if reason := native_library.why_not():
        pytest.skip(f"no CUDA device in host memory: {reason}")


def run(folder: Path, *names: str, ranks: int = 1) -> list[dict[str, Any]]:
    results = host_cuda.run(HELPERS / "host_cuda_cases.py", str(folder), *names, ranks=ranks)
    assert len(results) == ranks * len(names)
    return results


def test_device_keeps_the_rules_of_cuda() -> None:
    assert host_cuda.run(HELPERS / "host_cuda_rules.py") == [{"rules": "hold"}]


def test_a_trainer_runs_on_the_device(tmp_path: Path) -> None:
    for result in run(tmp_path, *FAST):
        assert not faults(result), faults(result)


def test_ranks_run_on_devices_of_their_own(tmp_path: Path) -> None:
    for result in run(tmp_path, *FAST_RANKS, ranks=2):
        assert not faults(result), faults(result)


@pytest.mark.slow
def test_every_variant_runs_on_the_device(tmp_path: Path) -> None:
    results = {result["case"]: result for result in run(tmp_path, *OTHERS)}
    broken = {name: faults(result) for name, result in results.items()}
    assert not any(broken.values()), {name: lines for name, lines in broken.items() if lines}
    assert len({results[name]["digest"] for name in SAME_BITS}) == 1


@pytest.mark.slow
def test_mistakes_of_ten_kinds_are_noticed(tmp_path: Path) -> None:
    results = host_cuda.run(MUTANTS, str(tmp_path))
    missed = [result["kind"] for result in results if not result["shown"]]
    assert len(results) == 11 and not missed, missed


@pytest.mark.slow
def test_every_sharding_runs_on_the_device(tmp_path: Path) -> None:
    results = run(tmp_path, *RANKS, ranks=2)
    broken = {result["case"]: faults(result) for result in results}
    assert not any(broken.values()), {name: lines for name, lines in broken.items() if lines}
    assert len({result["digest"] for result in results if result["case"] in SAME_BITS_ON_RANKS}) == 1
