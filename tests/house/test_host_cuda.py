"""The trainer's path on a CUDA device in host memory: the branches that only a GPU takes, with values.

`tests/helpers/host_cuda.py` describes the device and its limits. One process runs many cases.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cuda_places
import host_cuda
import native_library
import pytest
from host_cuda_cases import CASES, RANKS, faults
from paths import HELPERS

FAST = ("all on the host", "lora and teacher")
FAST_RANKS = ("fsdp saved",)
OTHERS = tuple(name for name in CASES if name not in (*FAST, *RANKS))

# Variants that leave the same bits as `bfloat16`. Runs that save train the last step from a checkpoint.
SAME_BITS = (
    "bfloat16",
    "budget",
    "streamed",
    "sampling",
    "copied",
    "saved",
    "streamed saved",
    "overlap",
    "evaluated",
    "asleep",
)
SAME_BITS_ON_RANKS = ("none", "optimizer", "gradients", "fsdp", "gradients on the host", "fsdp saved")
MUTANTS = HELPERS / "host_cuda_mutants.py"


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    if reason := native_library.why_not():
        pytest.skip(f"no CUDA device in host memory: {reason}")


def run(folder: Path, *names: str, ranks: int = 1, attempt: int = 0) -> list[dict[str, Any]]:
    results = host_cuda.run(HELPERS / "host_cuda_cases.py", str(folder), *names, ranks=ranks, attempt=attempt)
    assert len(results) == ranks * len(names)
    return results


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("fast"), *FAST)


@pytest.fixture(scope="module")
def fast_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Ranks that join before accelerate, like ranks that torchrun has restarted."""
    return run(tmp_path_factory.mktemp("fast-ranks"), *FAST_RANKS, ranks=2, attempt=1)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("others"), *OTHERS)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"), *(name for name in RANKS if name not in FAST_RANKS), ranks=2)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = host_cuda.run(HELPERS / "host_cuda_commands.py", str(tmp_path_factory.mktemp("commands")))
    return result


def check(results: list[dict[str, Any]]) -> None:
    broken = {result["case"]: lines for result in results if (lines := faults(result))}
    assert not broken, broken


@pytest.mark.slow  # of the device of tests; the next test is of the trainer
def test_device_keeps_the_rules_of_cuda() -> None:
    assert host_cuda.run(HELPERS / "host_cuda_rules.py") == [{"rules": "hold"}]


def test_a_trainer_runs_on_the_device(fast: list[dict[str, Any]]) -> None:
    check(fast)


@pytest.mark.slow  # test_fake_nccl.py has the order of exchanges
def test_ranks_run_on_devices_of_their_own(fast_ranks: list[dict[str, Any]]) -> None:
    check(fast_ranks)


@pytest.mark.slow
def test_every_variant_runs_on_the_device(others: list[dict[str, Any]]) -> None:
    check(others)
    assert len({result["digest"] for result in others if result["case"] in SAME_BITS}) == 1


@pytest.mark.slow
def test_every_sharding_runs_on_the_device(ranks: list[dict[str, Any]], fast_ranks: list[dict[str, Any]]) -> None:
    check(ranks)
    assert len({result["digest"] for result in ranks + fast_ranks if result["case"] in SAME_BITS_ON_RANKS}) == 1


@pytest.mark.slow
def test_commands_run_on_the_device(commands: dict[str, Any]) -> None:
    assert set(commands["statuses"].values()) == {0}, commands["statuses"]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # alone it runs all cases
def test_device_runs_the_places_of_its_table(
    fast: list[dict[str, Any]],
    fast_ranks: list[dict[str, Any]],
    others: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    commands: dict[str, Any],
) -> None:
    reached = Counter[str]()
    for result in (*fast, *fast_ranks, *others, *ranks, commands):
        reached |= Counter(result["reached"])
    missing = cuda_places.listed("device") - reached
    assert not missing, f"cuda_places.toml lists places that no case runs: {dict(missing)}"


@pytest.mark.slow
def test_mistakes_of_ten_kinds_are_noticed(tmp_path: Path) -> None:
    results = host_cuda.run(MUTANTS, str(tmp_path))
    missed = [result["kind"] for result in results if not result["shown"]]
    assert len(results) == 11 and not missed, missed
