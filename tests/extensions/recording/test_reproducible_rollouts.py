"""Rollouts, rewards and training are the same for any order of the rewards, and after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from reward_cases import in_order

from colograd import GRPOTrainer
from colograd.extensions.recording.completions import logged_steps, read_log

pytestmark = pytest.mark.engine


def train(model: Path, folder: Path, **changes: Any) -> tuple[dict[int, list[Any]], dict[int, list[Any]], Any]:
    """Returns {step: logged rows}, {step: extra columns of each group's first rollout}, and the weights."""
    config = tiny.config(folder, log_completions=True, log_completions_steps=100, reward_timeout=1000.0, **changes)
    trainer = GRPOTrainer(str(model), in_order, config, tiny.prompts())
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
    return logged, {step: [row.extra for row in rows[::4]] for step, rows in steps.items()}, weights


def test_reward_order_and_resume_change_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run scores in its own process. The other is resumed at its middle, and its two workers end the last first."""
    calm, groups, weights = train(tiny_model, tmp_path / "calm", save_strategy="steps", save_steps=2)
    shutil.copytree(tmp_path / "calm" / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    ended = tmp_path / "ended"
    ended.mkdir()
    waits_for = {groups[step][0]["answer"]: groups[step][-1]["answer"] for step in (3, 4)}
    monkeypatch.setenv("REWARD_ORDER", json.dumps([str(ended), waits_for]))
    other, groups, weights_again = train(tiny_model, tmp_path / "other", reward_workers=2)
    assert list(calm) == [1, 2, 3, 4] and other == {step: calm[step] for step in (3, 4)}
    assert torch.equal(weights, weights_again)
    assert all(rows[0]["ended"] > rows[-1]["ended"] for rows in groups.values())
