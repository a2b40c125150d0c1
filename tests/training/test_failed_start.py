"""A start that fails leaves nothing behind: the next trainer of the process works, though the exception is kept."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny

from colograd import GRPOTrainer
from colograd.runtime import failures
from colograd.weights.sync import CopiedWeights


class Unwilling(CopiedWeights):
    """A weight publisher that fails after the engine is built."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("not these weights")


class Failing(GRPOTrainer):
    """A trainer that fails at the end of its construction."""

    def _make_sampler(self, *args: Any) -> Any:
        kept_alive.extend(weakref.ref(part) for part in (self, self.engine, self.engine.model, self.policy.model))
        raise RuntimeError("nothing to say")


kept_alive: list[weakref.ref] = []


def build(model: Path, folder: Path, cls: type[GRPOTrainer] = GRPOTrainer, **changes: Any) -> GRPOTrainer:
    return cls(str(model), tiny.vowels, tiny.config(folder, max_steps=1, **changes), tiny.prompts())


@pytest.fixture
def unsupported(tmp_path: Path) -> Path:
    """A model with a head size that transformers supports and vLLM's attention doesn't."""
    folder = tiny.make_model(tmp_path / "heads-of-16", layers=1)
    import transformers as hf

    shape = json.loads((folder / "config.json").read_text()) | {"head_dim": 16}
    hf.LlamaForCausalLM(hf.LlamaConfig(**shape)).save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_bad_and_good_trainers_in_a_row(tiny_model, unsupported, tmp_path) -> None:
    """Bad trainers fail at different places, and their exceptions are kept. A good trainer trains after each bad one,
    so its process groups must have survived. The last trainer is dropped without `close`."""
    kept = []
    bad: list[tuple[str, Path, dict[str, Any]]] = [
        (
            "No available memory",
            tiny_model,
            {"vllm_engine_kwargs": {"kv_cache_memory_bytes": 4096}},
        ),  # in the middle of vLLM's
        ("head_dim=16", unsupported, {}),  # in its first forward
        ("not these weights", tiny_model, {"weights": f"{__name__}:Unwilling"}),
    ]
    previous: GRPOTrainer | None = None
    for number, (said, model, changes) in enumerate(bad):
        with pytest.raises(Exception, match=said) as failure:
            build(model, tmp_path / f"bad-{number}", **changes)
        kept.append(failure.value)
        if previous is not None:
            previous.train()
            previous.close()
        if number % 2 == 0:
            previous = build(tiny_model, tmp_path / f"good-{number}")
        else:
            previous = None
            dropped = build(tiny_model, tmp_path / f"good-{number}")
            dropped.train()
            engine = weakref.ref(dropped.engine)
            del dropped
    last = build(tiny_model, tmp_path / "last")
    assert engine() is None, "it made room for the next"
    last.train()
    assert last.state.global_step == 1
    last.close()
    last.close()  # once is enough, twice does no harm


@pytest.mark.engine
def test_an_exception_keeps_neither_the_engine_nor_the_policy(tiny_model, tmp_path) -> None:
    with pytest.raises(RuntimeError, match="nothing to say") as failure:
        build(tiny_model, tmp_path, Failing)
    gc.collect()
    assert failure.value.__traceback__ is not None
    assert len(kept_alive) == 4 and [part() for part in kept_alive] == [None] * 4


def test_workers_end_with_a_start_that_fails(tiny_model, tmp_path) -> None:
    before = {*threading.enumerate()}
    with pytest.raises(ValueError, match="train_dataset is missing"):
        GRPOTrainer(str(tiny_model), tiny.vowels, tiny.config(tmp_path, reward_workers=2, max_steps=1))
    of_process = {"colograd-watchdog", "colograd-stop"}  # the process's watchdog stays, and "stop" ends a moment later
    assert not {thread.name for thread in {*threading.enumerate()} - before} - of_process


def test_frames_of_an_error_and_its_causes_are_forgotten() -> None:
    class Large:
        """A type that supports weak references."""

    seen = []

    def first() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise KeyError("first")

    def second() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        try:
            first()
        except KeyError as error:
            raise ValueError("second") from error

    def third() -> None:
        try:
            first()
        except KeyError as error:
            handled = error
            try:
                second()
            except ValueError as late:
                assert all(reference() is not None for reference in seen)
                failures.forget_frames(late, but=handled)
                raise

    with pytest.raises(ValueError, match="second") as failure:
        third()
    assert failure.value.__cause__ is not None
    assert [reference() is not None for reference in seen] == [True, False, False], "of the first, nobody asked"
