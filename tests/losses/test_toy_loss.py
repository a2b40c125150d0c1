"""A user's loss: plain REINFORCE. Only this file knows the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.losses import OverCompletions, TokenLoss, Tokens


@dataclass(frozen=True)
class Reinforce(OverCompletions, TokenLoss):
    """Loss -A log pi: the mean over completions of each completion's token mean, without ratio and clip."""

    temperature: float  # a knob is a field that has a configuration field's name

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.advantages * tokens.logprobs

    def observe(self, tokens: Tokens) -> Any:
        return {"reinforce/logprob": tokens.mean(tokens.logprobs)}, {}, {}


@pytest.mark.engine
def test_a_run_trains_with_it_and_logs_its_metric(tiny_model, tmp_path, closing) -> None:
    """On-policy the ratio of `grpo` is 1, so both losses have the same gradient and leave the same weights."""
    runs = []
    for loss in (f"{__name__}:Reinforce", "grpo"):
        config = tiny.config(tmp_path / loss[-4:], max_steps=2, loss_type=loss, temperature=0.9)
        trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts()))
        trainer.train()
        runs.append((trainer, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))
        trainer.engine.invalidate()
    (ours, weights), (_, expected) = runs
    assert ours.loss.loss == Reinforce(temperature=0.9)
    logs = [entry for entry in ours.state.log_history if "loss" in entry]
    assert len(logs) == 2 and all(entry["reinforce/logprob"] < 0 for entry in logs)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
