"""Runs with objectives whose terms need the whole step, on the real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

from colograd import GRPOTrainer

pytestmark = pytest.mark.engine

TERMS = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "top_entropy_quantile": 0.3,
    "use_adaptive_entropy": True,
    "entropy_coef": 0.01,
    "entropy_target": 100.0,  # always below: the bonus acts from the second step on
    "off_policy_mask_threshold": 0.5,
    "beta": 0.1,
    "loss_eval": True,
}


def equal_or_not(completions: list, answer: list[str], **kwargs: object) -> list[float]:
    return [1.0] * len(completions) if ord(answer[0]) % 2 else tiny.vowels(completions)


def test_entropy_terms_ignore_the_token_budget(tiny_model: Path, tmp_path: Path) -> None:
    """One micro-batch per step or one per completion gives the same losses and weights. Half of the groups have no
    reward difference, but they have entropies."""
    found = []
    for budget in (4096, 1):
        folder = tmp_path / str(budget)
        args = tiny.config(
            folder, max_tokens_per_microbatch=budget, max_steps=2, save_strategy="steps", save_steps=2, **TERMS
        )
        trainer = GRPOTrainer(tiny_model, equal_or_not, args, tiny.prompts(), tiny.prompts(3))
        assert not trainer.learner.rules.skip_without_signal
        trainer.train()
        of_training = trainer.learner.objective
        evaluated = trainer.evaluate()
        assert trainer.learner.objective is of_training
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        trainer.close()
        found.append((weights, logs, evaluated))
        state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
        stored = state["stateful_callbacks"]["EntropyController"]
        assert stored["coefficient"] == pytest.approx(0.01 + 2 * 0.005) == logs[-1]["entropy_coef"]
    (whole, one, one_evaluated), (split, many, many_evaluated) = found
    assert (whole - split).norm() < 1e-6 * whole.norm()
    for name in ("eval_loss", "eval_policy_loss", "eval_entropy", "eval_kl"):
        assert one_evaluated[name] == pytest.approx(many_evaluated[name], rel=1e-5, abs=1e-6), name
    assert one_evaluated["eval_loss"] < one_evaluated["eval_policy_loss"] - 1e-3 and one_evaluated["eval_kl"] > 0
    assert not any("bonus" in name or name == "eval_entropy_coef" for name in one_evaluated)
    for name in ("loss", "policy_loss", "entropy", "entropy_coef", "kl", "clip_ratio/region_mean"):
        assert [e[name] for e in one] == pytest.approx([e[name] for e in many], rel=1e-5, abs=1e-6), name
    assert one[0]["loss"] == pytest.approx(one[0]["policy_loss"]) and one[1]["loss"] < one[1]["policy_loss"] - 1e-3
    assert [e["train/micro_batches"] for e in one] == [1] * 2 and many[0]["train/micro_batches"] == 16
    assert "time/entropies" in many[0] and "time/entropies" not in one[0]
    assert all(entry["frac_reward_zero_std"] > 0 for entry in one)
