"""Runs that keep in host memory what they can: they end with the weights of a run that keeps nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd import trainer as trainer_module
from colograd.config import GRPOConfig
from colograd.policy.layer_inputs import LayerInputs, inputs_on_host
from colograd.sharding import host_sums
from colograd.training import adamw_split

OFFLOADS: dict[str, Any] = {"offload_optimizer": "stream", "offload_gradients": True}


class Counting(LayerInputs):
    def __init__(self, sent: list[torch.Tensor]) -> None:
        super().__init__(torch.device("cpu"))
        self.sent = sent

    def send(self, place: torch.Tensor, tensor: torch.Tensor, readable: Any) -> Any:
        self.sent.append(tensor)
        return super().send(place, tensor, readable)


class OutOfMemoryOnce(GRPOTrainer):
    """Runs out of memory in its second step, when gradients are there already."""

    passes = 0

    def compute_loss(self, model: Any, micro_batch: Any) -> Any:
        if self.state.global_step == 1:
            self.passes += 1
            if self.passes == 3:
                raise torch.OutOfMemoryError("no room")
        return super().compute_loss(model, micro_batch)


@pytest.mark.engine
def test_a_run_with_all_of_it_ends_with_the_same_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, clipped, with a reference, and with a step that is packed again after it ran out of memory. On a CPU
    nothing is offloaded, so the run is told that it isn't on one where it asks for that."""

    def train(offloads: bool) -> dict[str, torch.Tensor]:
        for name in ("streams_optimizer", "offloads_gradients"):
            monkeypatch.setattr(GRPOConfig, name, property(lambda self: offloads))
        sent.clear()
        config = tiny.config(
            tmp_path / str(offloads), max_steps=3, optim="adamw_split", model_init_kwargs={"dtype": "bfloat16"},
            beta=0.1, max_grad_norm=0.01, max_tokens_per_microbatch=80,
            gradient_checkpointing="offload" if offloads else True, **OFFLOADS,
        )  # fmt: skip
        trainer = OutOfMemoryOnce(str(tiny_model), tiny.vowels, config, tiny.prompts(12))
        try:
            trainer.train()
            assert trainer.passes > 3 and trainer.learner.rules.max_tokens < 80
            assert bool(sent) == trainer.optimizer.optimizer.streamed == offloads
            assert (getattr(trainer.optimizer.optimizer, "host_gradients", None) is not None) == offloads
            assert all(step["grad_norm"] > 0.01 for step in trainer.state.log_history if "grad_norm" in step)
            return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        finally:
            trainer.close()

    sent: list[torch.Tensor] = []
    monkeypatch.setattr(trainer_module, "inputs_on_host", lambda model, _: inputs_on_host(model, Counting(sent)))
    for module in (adamw_split, host_sums):
        monkeypatch.setattr(module, "ELEMENTS", 1000)
    monkeypatch.setattr(host_sums, "LIMIT", 10000)
    plain, offloaded = train(False), train(True)
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)
