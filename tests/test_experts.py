"""Mixtures of experts: whose memory their weights are in, what rows they take, what the router's terms are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from colograd import GRPOTrainer
from colograd.weights.shared import SharedWeights


def build(model: Path, tmp_path: Path, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(str(model), tiny.vowels, tiny.config(tmp_path / "run", **changes), tiny.prompts())


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"])
def test_experts_train_in_the_engines_memory(family: str, tmp_path: Path, closing) -> None:
    """Three steps: after each publish the engine's weights are the policy's, bit for bit, and what the sampler said of
    its tokens is what the trainer says."""
    model = tiny.make_model(tmp_path / "model", family, tied=False)
    trainer = closing(build(model, tmp_path, max_steps=3))
    assert isinstance(trainer.weights, SharedWeights)
    apart = {part.name.rpartition(".")[2] for part, _ in trainer.weights.copied}
    assert apart == ({"gate_up_proj", "down_proj"} if family == "gpt_oss" else set())  # which has them transposed
    assert bool(trainer.policy.why_padded) == (family == "gpt_oss")  # whose attention has sinks
    publish, published = trainer.weights.publish, []

    def publish_and_compare(version: int) -> int:
        published.append((publish(version), trainer.weights.differing()))
        return published[-1][0]

    trainer.weights.publish = publish_and_compare
    trainer.train()
    trainer.publish()
    assert len(published) == 4 and all(not differing for _, differing in published), published
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(s["sampling/sampling_logp_difference/mean"] < 1e-5 for s in steps)
