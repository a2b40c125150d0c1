"""Exchanges of a step on 8 and 64 simulated GPUs (`fake_nccl`): order, sizes, dtypes, ranks in agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_gpu
import native_library
import pytest
from needs import has, needs
from paths import HELPERS

FAST, OTHERS = ("gradients", *(("fsdp",) if has("fsdp") else ())), ("none", "optimizer")
WAYS = [*FAST, *(pytest.param(way, marks=pytest.mark.slow) for way in OTHERS)]
FLOAT32, BFLOAT16 = 4, 2  # bytes of a gradient's element, and of a weight's


class Steps(dict[tuple[str, int], dict[str, Any]]):
    """Steps by strategy and rank, first (0) or last (-1). One process runs `FAST`, a second the other strategies."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __missing__(self, key: tuple[str, int]) -> dict[str, Any]:
        ways = FAST if key[0] in FAST else OTHERS
        done = fake_gpu.run(Path(HELPERS) / "fake_nccl.py", str(self.ranks), *ways)
        assert not [case["error"] for case in done if "error" in case]
        self.update(((case["way"], -1 if case["rank"] else 0), case) for case in done)
        return self[key]


@pytest.fixture(scope="module", params=[pytest.param(8, marks=pytest.mark.slow), 64])
def steps(request: pytest.FixtureRequest) -> Steps:
    if reason := native_library.why_not():
        pytest.skip(reason)
    return Steps(request.param)


def exchanged(step: dict[str, Any], phase: str) -> dict[str, float]:
    """Bytes per parameter that a phase exchanges, by collective."""
    found: dict[str, float] = {}
    for name, nbytes, dtype, device in step["phases"][phase]:
        assert device == "cuda" and dtype == ("bfloat16" if name == "all_gather" else "float32")
        found[name] = found.get(name, 0) + nbytes / step["elements"]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_first_and_last_rank_make_the_same_calls(way: str, steps: Steps) -> None:
    """If two ranks called different collectives or sizes, NCCL would hang. The host waits for nothing."""
    first, last = steps[way, 0], steps[way, -1]
    assert first["phases"] == last["phases"] and first["traffic"] == last["traffic"]
    for step in (first, last):
        assert step["devices"] == ["cuda"] and step["waits"] == []
        assert step["flash"] == {"forward": 4 * 3, "backward": 4 * 3}


@pytest.mark.parametrize("way", WAYS)
def test_each_phase_has_the_strategys_exchanges(way: str, steps: Steps) -> None:
    """Exchanges of two micro-batches and a step. Parts are padded to equal sizes, so bytes may be 3 % more."""
    step = steps[way, 0]
    found = {phase: exchanged(step, phase) for phase in step["phases"]}
    summed = {"reduce_scatter": pytest.approx(FLOAT32, rel=0.03)}
    gathered = {"all_gather": pytest.approx(BFLOAT16, rel=0.03)}
    nothing: dict[str, float] = {}
    expected: dict[str, Any] = dict.fromkeys(found, nothing)
    if way == "none":
        expected["sum"] = {"all_reduce": FLOAT32}
    elif way == "optimizer":
        expected |= {"sum": summed, "optimizer": gathered}
    elif way == "gradients":
        expected |= {"backward 0": summed, "backward 1": summed, "optimizer": gathered}
    else:  # the head and the embedding aren't gathered twice
        for number in range(2):
            again = found[f"backward {number}"]["all_gather"]
            assert 0.8 * BFLOAT16 < again < BFLOAT16
            expected[f"forward {number}"] = gathered
            expected[f"backward {number}"] = {"all_gather": again} | summed
    assert found == expected
    moments = 3 * step["elements"]  # and the 16 bits that make a weight a float32
    assert step["state"] == (moments if way == "none" else pytest.approx(moments / step["ranks"], rel=0.03))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_run_logs_is_what_was_exchanged(way: str, steps: Steps) -> None:
    step = steps[way, 0]
    bytes_of = {"all_gather": 0, "all_reduce": 0, "reduce_scatter": 0}
    for phase in step["phases"].values():
        for name, nbytes, *_ in phase:
            bytes_of[name] += nbytes
    assert step["traffic"]["sync/gathered_bytes"] == bytes_of["all_gather"]
    assert step["traffic"]["sync/reduced_bytes"] == bytes_of["all_reduce"] + bytes_of["reduce_scatter"]


@needs("fsdp")
def test_layer_gathers_precede_sums_of_the_next_layer(steps: Steps) -> None:
    """In a backward of FSDP: the next weights are on their way while gradients are computed."""
    names = [name for name, *_ in steps["fsdp", 0]["phases"]["backward 1"]]
    assert names[:2] == ["all_gather", "reduce_scatter"] and names[-3:] == ["reduce_scatter"] * 3
    assert names.count("all_gather") == 3
