"""Expandable segments: on by default where possible, but the user's settings win."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colograd.memory import device_turns as segments


def run(device: str = "cuda:0", **changes: Any) -> Any:
    settings = {"vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    return SimpleNamespace(device=torch.device(device), **(settings | changes))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the settings of torch's allocator."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.append)
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


def test_they_are_on_on_a_gpu(told: list[str]) -> None:
    assert segments.expand_segments(run()) and told == ["expandable_segments:True"]


@pytest.mark.parametrize("changes", [{"vllm_enable_sleep_mode": True}, {"vllm_tensor_parallel_size": 2}])
def test_what_forbids_them(told: list[str], changes: dict[str, Any]) -> None:
    assert not segments.expand_segments(run(**changes)) and told == []


@pytest.mark.parametrize("name", segments.VARIABLES)
def test_the_users_settings_are_left_alone(told: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not segments.expand_segments(run()) and told == []


def test_a_cpu_has_none(told: list[str]) -> None:
    assert not segments.expand_segments(run("cpu")) and told == []


@pytest.mark.gpu
def test_torch_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing blocks leave no holes, so the reserved memory is little more than the largest block."""
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert segments.expand_segments(run())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for mebibytes in range(64, 512, 32):
        torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before < 600 * 2**20
