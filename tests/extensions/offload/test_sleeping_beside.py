"""The optimizer's state is on the host and the KV cache sleeps: order of the calls, and equal weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.engine.vllm_engine import VLLMEngine
from colograd.memory.device_turns import DeviceTurns
from colograd.reporting.metrics import PhaseTimes
from colograd.runtime import registry
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32


def trained(steps: int = 2, cls: Any = AdamWSplit) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(torch.bfloat16)
    accumulate_in_float32(model.parameters())
    optimizer = cls(model.parameters(), lr=1e-2)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


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


def test_the_optimizer_leaves_before_the_cache_comes_and_returns_after_it_went(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, offload_optimizer=True, vllm_enable_sleep_mode=True)
    monkeypatch.setattr(type(config), "on_cpu", False)
    times = PhaseTimes()
    turns = DeviceTurns(sleeping_engine(Core(calls)), config, times)
    assert calls == ["forget", "sleep 0 keep", "release"], "the first micro-batch is measured without it"
    _, optimizer = trained()
    assert turns.offload is not None
    monkeypatch.setattr(turns.offload, "to_host", lambda given: calls.append("out"))
    monkeypatch.setattr(turns.offload, "to_device", lambda: calls.append("back"))
    calls.clear()
    with turns.sampling(optimizer):
        calls.append("sample")
    assert calls == ["out", "empty cache", "wake ['kv_cache']", "sample", "forget", "sleep 0 keep", "release", "back"]
    assert set(times.take()) == {"time/offload", "time/wake", "time/sleep"}
    with pytest.raises(KeyError), turns.sampling(None):
        raise KeyError("requests are in flight")
    assert turns.engine.asleep is False


@pytest.mark.slow  # the tests above have the order
@pytest.mark.engine
def test_a_run_that_sleeps_and_offloads_trains_to_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    """The order is as on a GPU, but nothing is unmapped. vLLM's scheduler refuses calls in a wrong order."""
    seen: list[tuple[str, bool, bool]] = []

    class Watched(GRPOTrainer):
        def look(self, what: str) -> None:
            what = f"evaluate: {what}" if self.evaluating else what
            offload = self.device_turns.offload
            seen.append((what, self.engine.asleep, offload is not None and bool(offload._away)))

        def generate(self, prompts: Any) -> Any:
            self.look("generate")
            return super().generate(prompts)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.look("loss")
            return super().compute_loss(*args, **kwargs)

    def weights(sleeping: bool) -> list[torch.Tensor]:
        config = tiny.config(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=2, loss_eval=False)
        trainer = Watched(
            str(tiny_model), tiny.vowels, config, train_dataset=tiny.prompts(), eval_dataset=tiny.prompts(4)
        )
        if sleeping:
            executor = trainer.engine.core.model_executor
            theirs = executor.collective_rpc
            executor.collective_rpc = lambda method, *args, **kwargs: (
                None if method in ("discard", "wake_up") else theirs(method, *args, **kwargs)
            )
            trainer.engine.sleeps = True
            (moves_of,) = registry.hooks_of("offload", "optimizer_moves")
            trainer.device_turns.offload = moves_of(SimpleNamespace(offload_optimizer="sampling", on_cpu=False))
            trainer.engine.sleep()
        trainer.train()
        assert not sleeping or trainer.engine.asleep, "also after the evaluation"
        found = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.close()
        return found

    awake = weights(sleeping=False)
    assert {entry[1:] for entry in seen} == {(False, False)}
    seen.clear()
    assert all(torch.equal(a, b) for a, b in zip(awake, weights(sleeping=True), strict=True))
    assert {entry for entry in seen if entry[0] == "loss"} == {("loss", True, False)}
    assert [entry[1:] for entry in seen if entry[0] == "generate"] == [(False, False), (False, True), (False, True)]


def test_on_a_cpu_nothing_moves_and_a_line_says_so(calls: list[str], tmp_path: Path) -> None:
    config = tiny.config(tmp_path, offload_optimizer=True, vllm_enable_sleep_mode=True, use_cpu=True)
    turns = DeviceTurns(sleeping_engine(Core(calls), sleeps=False), config, PhaseTimes())
    with turns.sampling(trained()[1]):
        pass
    assert calls == [] and turns.offload is None
    assert [note.split()[1] for note in turns.notes] == ["vllm_enable_sleep_mode", "offload_optimizer"]
    quiet = DeviceTurns(sleeping_engine(Core(calls), sleeps=False), tiny.config(tmp_path, use_cpu=True), PhaseTimes())
    assert not quiet.notes
