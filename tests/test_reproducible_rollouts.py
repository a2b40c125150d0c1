"""The same rollouts, rewards and training for any order in which rewards come back, and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from reward_cases import jittered

from colograd import GRPOTrainer
from colograd.reporting.completion_log import logged_steps, read_log

pytestmark = pytest.mark.engine


def train(model: Path, folder: Path, **changes: Any) -> tuple[dict[int, list[Any]], dict[int, list[float]], Any]:
    """step -> its log without what was logged beside, step -> when each group's reward came; the final weights."""
    config = tiny.config(folder, log_completions=True, log_completions_steps=100, reward_timeout=60.0, **changes)
    trainer = GRPOTrainer(str(model), jittered, config, tiny.prompts())
    try:
        trainer.train(resume_from_checkpoint="auto")
        weights = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    finally:
        trainer.close()
    steps = {step: read_log(path)[0] for step, path in logged_steps(folder).items()}
    logged = {
        step: [(r.position, r.completion, r.completion_tokens, r.rewards, r.advantage) for r in rows]
        for step, rows in steps.items()
    }
    return logged, {step: [row.extra["ended"] for row in rows[::4]] for step, rows in steps.items()}, weights


def test_the_order_in_which_rewards_come_back_changes_nothing_nor_does_a_resume(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run scores in its own process. The other is resumed at its middle, and has two workers of random speed."""
    calm, _, weights = train(tiny_model, tmp_path / "calm", save_strategy="steps", save_steps=2)
    shutil.copytree(tmp_path / "calm" / "checkpoint-2", tmp_path / "jitter" / "checkpoint-2")
    monkeypatch.setenv("REWARD_JITTER", "0.5")
    jitter, ended, weights_again = train(tiny_model, tmp_path / "jitter", reward_workers=2)
    assert list(calm) == [1, 2, 3, 4] and jitter == {step: calm[step] for step in (3, 4)}
    assert torch.equal(weights, weights_again)
    assert any(times != sorted(times) for times in ended.values()), "rewards came in another order than the prompts"
