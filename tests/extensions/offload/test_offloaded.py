"""Runs that offload all they can to host memory: they end with the weights of a run that keeps nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig

from colograd import GRPOTrainer
from colograd.config import GRPOConfig
from colograd.extensions.offload import adamw, host_stream, layer_inputs
from colograd.extensions.offload.layer_inputs import LayerInputs, inputs_on_host

OFFLOADS: dict[str, Any] = {"offload_optimizer": "stream", "offload_gradients": True}


class Counting(LayerInputs):
    def __init__(self, sent: list[torch.Tensor]) -> None:
        super().__init__(torch.device("cpu"))
        self.sent = sent

    def copy(self, place: torch.Tensor, tensor: torch.Tensor, stream: Any, after: Any) -> Any:
        if stream is self.emptying:
            self.sent.append(tensor)
        return super().copy(place, tensor, stream, after)


class OutOfMemoryOnce(GRPOTrainer):
    """A trainer that runs out of memory in its second step, when gradients exist."""

    passes = 0

    def compute_loss(self, model: Any, micro_batch: Any) -> Any:
        if self.state.global_step == 1:
            self.passes += 1
            if self.passes == 3:
                raise torch.OutOfMemoryError("no room")
        return super().compute_loss(model, micro_batch)


def adapter() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Family, `model_init_kwargs` and adapter.
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "bfloat16": ("llama", {"dtype": "bfloat16"}, None),
    "float32": ("llama", {"dtype": "float32"}, None),
    "mixture": ("qwen3_moe", {"dtype": "bfloat16"}, None),
    "mixture, float32": ("qwen3_moe", {"dtype": "float32"}, None),
    "adapter": ("llama", {"dtype": "bfloat16"}, adapter),
    "adapter, float32": ("llama", {"dtype": "float32"}, adapter),
    "packed base": ("llama", {"dtype": "bfloat16", "quantization_config": NF4}, adapter),
    "packed base, float32": ("llama", {"dtype": "float32", "quantization_config": NF4}, adapter),
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Layer inputs that were sent to the host."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(layer_inputs, "inputs_on_host", lambda model, _: inputs_on_host(model, Counting(sent)))
    for module in (adamw, host_stream):
        monkeypatch.setattr(module, "ELEMENTS", 1000)
    monkeypatch.setattr(host_stream, "LIMIT", 10000)
    return sent


def offloading(monkeypatch: pytest.MonkeyPatch, offloads: bool) -> dict[str, Any]:
    """Fields of a run that offloads everything or nothing. A CPU run offloads nothing, so its properties are
    patched."""
    for name in ("streams_optimizer", "offloads_gradients"):
        monkeypatch.setattr(GRPOConfig, name, property(lambda self: offloads))
    return OFFLOADS | {"optim": "adamw_split", "gradient_checkpointing": "offload" if offloads else True}


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind", ["bfloat16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "bfloat16")]
)
def test_a_run_with_all_of_it_ends_with_the_same_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[torch.Tensor]
) -> None:
    """Gradients are clipped, there is a reference, and a step is packed again after it ran out of memory."""
    family, init, lora = KINDS[kind]
    model = tiny.make_model(tmp_path / "model", family)

    def train(offloads: bool) -> dict[str, torch.Tensor]:
        sent.clear()
        config = tiny.config(
            tmp_path / str(offloads), max_steps=3, model_init_kwargs=dict(init), beta=0.1, max_grad_norm=0.01,
            max_tokens_per_microbatch=80, **offloading(monkeypatch, offloads),
        )  # fmt: skip
        trainer = OutOfMemoryOnce(str(model), tiny.vowels, config, tiny.prompts(12), peft_config=lora and lora())
        try:
            trainer.train()
            assert trainer.passes > 3 and trainer.learner.rules.max_tokens < 80
            assert bool(sent) == getattr(trainer.optimizer.optimizer, "streamed", False) == offloads
            assert (getattr(trainer.optimizer.optimizer, "host_gradients", None) is not None) == offloads
            assert all(step["grad_norm"] > 0.01 for step in trainer.state.log_history if "grad_norm" in step)
            return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        finally:
            trainer.close()

    plain, offloaded = train(False), train(True)
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_resumed_with_it_and_without_it(
    dtype: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[torch.Tensor]
) -> None:
    """Each process takes one step. Offloading changes from process to process, in both orders."""

    def train(folder: str, turns: list[bool], each: int) -> dict[str, torch.Tensor]:
        for turn, offloads in enumerate(turns, start=1):
            sent.clear()
            config = tiny.config(
                tmp_path / folder, max_steps=each * turn, lr_scheduler_type="constant", max_grad_norm=0.01,
                model_init_kwargs={"dtype": dtype}, save_strategy="steps", save_steps=1, **tiny.ONE_BY_ONE,
                **offloading(monkeypatch, offloads),
            )  # fmt: skip
            trainer = GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts(12))
            try:
                trainer.train(resume_from_checkpoint="auto")
                assert bool(sent) == getattr(trainer.optimizer.optimizer, "streamed", False) == offloads
                found = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
            finally:
                trainer.close()
        return found

    expected = train("plain", [False], each=3)
    for first in (False, True):
        found = train(f"{first} first", [first, not first, first], each=1)
        assert all(torch.equal(expected[name], found[name]) for name in expected), first
