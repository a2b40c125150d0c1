"""An engine's steps on a stream of high priority: which stream waits for which, and where what is queued."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from overlapping import apart

from colograd.extensions.overlap.engine.step_stream import IDLE, PRIORITY, StepStream


class Streams:
    """torch's streams, of which the calls are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, streams = list[str](), self

        class Stream:
            def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
                found = super().__new__(cls)
                found.name = "engine's" if priority == PRIORITY else "usual"
                return found

            def wait_stream(self, other: Stream) -> None:
                streams.calls.append(f"{self.name} waits for {other.name}")

        @contextlib.contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, self.present = self.present, chosen
            yield
            self.present = before

        self.present = Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.present)

    def queue(self, what: str) -> None:
        self.calls.append(f"{what} on the {self.present.name}")


BEGINS, ENDS = "engine's waits for usual", "usual waits for engine's"


def test_a_step_by_itself_comes_after_what_was_queued_and_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    core = SimpleNamespace(step=lambda: streams.queue("step"))
    StepStream().built(SimpleNamespace(core=core))
    core.step()
    assert streams.calls == [BEGINS, "step on the engine's", ENDS]


def test_amid_many_steps_no_stream_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    core, mine = SimpleNamespace(step=lambda: streams.queue("step")), StepStream()
    mine.built(SimpleNamespace(core=core))
    streams.queue("weights")
    with pytest.raises(RuntimeError), mine.while_generating():
        core.step()
        streams.queue("micro-batch")
        core.step()
        raise RuntimeError("a reward failed")
    core.step()
    assert streams.calls == [
        "weights on the usual",
        BEGINS, "step on the engine's", "micro-batch on the usual", "step on the engine's", ENDS,
        BEGINS, "step on the engine's", ENDS,
    ]  # fmt: skip


@pytest.mark.parametrize("own, others, in_graphs, freed", [(0, 9, 9, 0), (1, 0, 0, 1), (1, 9, 9, 1)])
def test_the_engine_s_freed_blocks_are_released(
    monkeypatch: pytest.MonkeyPatch, own: int, others: int, in_graphs: int, freed: int
) -> None:
    """When sampling ends, if its stream has many (``own``); those of other streams alone are left for these."""
    Streams(monkeypatch)
    mine, cleared = StepStream(), []
    mine.stream.cuda_stream = 7
    parts = [(7, (0, 0), own), (0, (0, 0), others), (7, (3, 1), in_graphs)]
    segments = [
        {"stream": stream, "segment_pool_id": pool, "total_size": size * IDLE + 5, "allocated_size": 5}
        for stream, pool, size in parts
    ]
    for name, value in {
        "memory_reserved": 2**40, "memory_allocated": 0, "memory_snapshot": segments, "empty_cache": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: cleared.append(name) or value)
    with mine.while_generating():
        with mine.while_generating():
            pass
        assert not cleared, "sampling goes on"
    assert cleared.count("empty_cache") == freed


def test_an_engine_is_built_on_its_stream_and_makes_streams_of_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which it captures graphs: these run with the priority that they were captured with."""
    streams = Streams(monkeypatch)
    usual, mine = torch.cuda.Stream, StepStream()
    with mine.while_built():
        streams.queue("weights")
        made: Any = torch.cuda.Stream()
        assert made.name == "engine's" and isinstance(made, usual) and torch.cuda.Stream(priority=0).name == "usual"
    assert torch.cuda.Stream is usual and streams.calls == [BEGINS, "weights on the engine's", ENDS]


@pytest.mark.gpu
@pytest.mark.engine
def test_on_a_gpu_a_micro_batch_runs_beside_the_tail_to_the_same_weights(tmp_path: Path) -> None:
    """An eighth of the tokens ends a completion, so that lengths differ; in bfloat16, so within its rounding.

    Rewards are computed in this process: a worker takes seconds to start, when a tiny model has long sampled.
    """
    from colograd import GRPOTrainer

    model, found = tiny.make_model(tmp_path / "model"), []
    for overlap in ("auto", "off"):
        args = tiny.config(
            tmp_path / overlap, overlap=overlap, max_steps=1, prompts_per_step=16, max_completion_length=128,
            max_tokens_per_microbatch=256, generation_kwargs={"stop_token_ids": [*range(3, 256, 8)]},
            model_init_kwargs={}, bf16=True, reward_workers=0,
        )  # fmt: skip
        trainer = GRPOTrainer(model, tiny.vowels, args, tiny.prompts(16))
        trainer.train()
        early = [entry["train/early_tokens"] for entry in trainer.state.log_history if "train/early_tokens" in entry]
        found.append((early, {name: value.cpu() for name, value in trainer.model.state_dict().items()}))
        if overlap == "auto":
            (feature,) = (each for each in trainer.engine._features if isinstance(each, StepStream))
            stream, runner = feature.stream, vars(trainer.engine.core.model_executor.driver_worker.worker.model_runner)
            assert stream.priority == PRIORITY and runner.get("main_stream", stream) == stream
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
        trainer.close()
    (early, mine), (never, theirs) = found
    assert any(early) and not never
    assert apart(mine, theirs) < 1e-2
