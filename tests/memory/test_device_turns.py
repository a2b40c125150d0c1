"""The KV cache and the optimizer's state take turns on the device: the order of their moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colograd.engine.building import weights_stay
from colograd.engine.vllm_engine import VLLMEngine


def step(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- the order


class Core:
    """Fake of vLLM's LLMEngine with the methods of sleeping. It records its calls."""

    def __init__(self, calls: list[str], in_flight: int = 0) -> None:
        self.calls, self.in_flight, self.stays_asleep = calls, in_flight, False
        scheduler = SimpleNamespace(has_requests=lambda: self.in_flight > 0)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler, batch_queue=None))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("forget")
        return True

    def step(self) -> None:
        self.in_flight -= 1
        self.calls.append("step")

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level} {mode}")

    def release_kv_cache_memory(self) -> None:
        self.calls.append("release")

    def wake_up(self, tags: list[str] | None) -> None:
        self.calls.append(f"wake {tags}")

    def is_sleeping(self) -> bool:
        return self.stays_asleep


def sleeping_engine(core: Core, sleeps: bool = True) -> VLLMEngine:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.sleeps, engine.asleep, engine.version = sleeps, False, 3
    engine.llm, engine._features = SimpleNamespace(llm_engine=core), ()
    return engine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty cache"))
    return said


def test_only_the_kv_cache_sleeps_and_the_version_stays(calls: list[str]) -> None:
    engine = sleeping_engine(Core(calls, in_flight=1))
    engine.sleep()
    assert calls == ["step", "forget", "sleep 0 keep", "release"] and engine.asleep
    engine.sleep()
    assert len(calls) == 4, "it sleeps already"
    engine.wake()
    assert calls[4:] == ["empty cache", "wake ['kv_cache']"] and not engine.asleep and engine.version == 3
    engine.wake()
    assert len(calls) == 6


def test_an_engine_that_stays_asleep_is_an_error(calls: list[str]) -> None:
    core = Core(calls)
    engine = sleeping_engine(core)
    engine.sleep()
    core.stays_asleep = True
    with pytest.raises(RuntimeError, match="vllm_enable_sleep_mode: false"):
        engine.wake()


def test_an_older_vllm_sleeps_at_level_1_which_finds_the_cache_only(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Core, "release_kv_cache_memory")
    engine = sleeping_engine(Core(calls))
    engine.sleep()
    engine.wake()
    assert calls == ["forget", "sleep 1 abort", "empty cache", "wake None"]


def test_an_engine_that_was_not_built_to_sleep_does_nothing(calls: list[str]) -> None:
    engine = sleeping_engine(Core(calls), sleeps=False)
    engine.sleep()
    engine.wake()
    assert calls == []


# -- vLLM's pool


@pytest.mark.engine
def test_weights_are_loaded_outside_the_pool_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own worker gets its sleeping memory pool for the KV cache only. The patch ends with the engine's build."""
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker").Worker
    asked: list[str] = []

    def theirs(self: Any, tag: str) -> str:
        asked.append(tag)
        return "the pool"

    monkeypatch.setattr(worker, "_maybe_get_memory_pool_context", theirs)
    with weights_stay():
        with worker._maybe_get_memory_pool_context(None, "weights"):
            pass
        assert worker._maybe_get_memory_pool_context(None, "kv_cache") == "the pool"
    assert asked == ["kv_cache"] and worker._maybe_get_memory_pool_context is theirs


@pytest.mark.engine
def test_a_vllm_whose_weights_can_not_stay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.delattr(Worker, "_maybe_get_memory_pool_context")
    with pytest.raises(RuntimeError, match=r"can't free its KV cache.*vllm_enable_sleep_mode: false"):
        with weights_stay():
            pass
