"""The policy's passes as a GPU would take them, without one (`fake_gpu`): devices, dtypes, flash calls, waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_gpu
import pytest
from paths import HELPERS

FIGURES = dict[str, Any]
LAYERS = 4


@pytest.fixture(scope="module")
def cases() -> dict[str, FIGURES]:
    """All of them, in one process: its imports take longer than the passes."""
    if reason := fake_gpu.why_not():
        pytest.skip(reason)
    return {case["name"]: case for case in fake_gpu.run(Path(HELPERS) / "fake_gpu_cases.py")}


def found(cases: dict[str, FIGURES], name: str) -> FIGURES:
    case = cases[name]
    assert "error" not in case, case["error"]
    return case


def check_on_the_gpu(case: FIGURES) -> None:
    assert case["devices"] == ["cuda"], "something was computed on the host"
    assert case["products"] == ["bfloat16"], "matrix products in another dtype"
    assert case["waits"] == [], "the host would wait for the device"


def check_plan(case: FIGURES) -> None:
    assert 0.9 < case["plan"] / case["peak"] < 1.1, (case["plan"] / 2**20, case["peak"] / 2**20)


@pytest.mark.parametrize("name", ["dense_tied", "dense_untied"])
def test_forward_and_backward(name: str, cases: dict[str, FIGURES]) -> None:
    case = found(cases, name)
    check_on_the_gpu(case)
    assert case["flash"] == {"forward": LAYERS, "backward": LAYERS}
    assert case["outputs"] == case["gradients"] == ["cuda torch.float32"]
    check_plan(case)


def test_a_tower_s_windows_are_one_flash_call_per_layer(cases: dict[str, FIGURES]) -> None:
    case = found(cases, "tower")
    check_on_the_gpu(case)
    assert case["flash"] == {"forward": 2, "backward": 2}
