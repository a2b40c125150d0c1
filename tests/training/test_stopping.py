"""A signal cuts a round: the resumed run samples and scores no group twice, and ends with the same weights."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from colograd import GRPOTrainer
from colograd.checkpoint import stop_signal

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("steps_per_generation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cut_round_resumes_bit_for_bit(
    tiny_model: Path, tmp_path: Path, closing: Any, monkeypatch: pytest.MonkeyPatch, steps_per_generation: int
) -> None:
    calls: dict[str, Counter[tuple[int, str]]] = {"whole": Counter(), "stopped": Counter()}
    cut_in = steps_per_generation  # the second round samples with this step's weights

    def make(name: str) -> GRPOTrainer:
        def reward(completions: list[Any], answer: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
            calls[name][trainer_state.global_step, answer[0]] += 1
            if name == "stopped" and sum(calls[name].values()) == 4 * steps_per_generation + 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            return tiny.vowels(completions)

        args = tiny.config(
            tmp_path / name, steps_per_generation=steps_per_generation, save_strategy="steps", save_steps=50,
            max_steps=2 * steps_per_generation, max_completion_length=16, stop_within=1000.0, **tiny.ONE_BY_ONE,
        )  # fmt: skip
        return closing(GRPOTrainer(str(tiny_model), reward, args, tiny.prompts()))

    def weights(trainer: GRPOTrainer) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()

    whole = make("whole")
    whole.train()
    monkeypatch.setattr(stop_signal, "schedule", lambda *_: (0.0, 1000.0))
    stopped = make("stopped")
    done = stopped.train()
    stopped.checkpointer.stop_signal.forget_deadline()
    assert done.global_step == stopped.state.global_step == cut_in
    assert [folder.name for folder in (tmp_path / "stopped").glob("checkpoint-*")] == [f"checkpoint-{cut_in}"]
    scored = sum(calls["stopped"].values())
    assert scored < 8 * steps_per_generation, "the second round was cut"
    stopped.train(resume_from_checkpoint="auto")
    assert calls["stopped"] == calls["whole"] and set(calls["whole"].values()) == {1}
    assert torch.equal(weights(stopped), weights(whole))
