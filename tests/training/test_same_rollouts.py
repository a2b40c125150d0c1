"""TRL's trainer and ours on the same rollouts: both sample the same prompts at each step, and whole runs (loss,
clipping, schedule, optimizer) leave the same weights. Losses and advantages alone: test_losses_trl, test_advantages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from fixed_rollouts import STEPS, Rollouts
from transformers import AutoModelForCausalLM

NAMED = ("reward", "reward_std", "grad_norm", "learning_rate")


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "iterations": {"num_iterations": 2, "loss_type": "dr_grpo", "scale_rewards": "none", "num_train_epochs": 2},
    "reference": {
        "beta": 0.04,
        "loss_type": "grpo",
        "scale_rewards": "batch",
        "vllm_importance_sampling_correction": False,
    },
    "sequences": {
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "optimizer": {
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "mask_truncated_completions": True,
        "max_grad_norm": 0.1,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "one_batch": {"loss_type": "bnpo", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
}
QUICK = ("reference", "sequences")


def settings(folder: Path, case: str) -> dict[str, Any]:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "model_init_kwargs": {"dtype": "float32"},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "max_steps": STEPS,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return given | CASES[case]


def run(kind: Any, config: Any, model: Path, made: Any = lambda trainer: trainer) -> tuple[Any, Rollouts]:
    rollouts = Rollouts()
    trainer = made(
        kind(
            model=str(model),
            reward_funcs=[tiny.vowels],
            args=config,
            train_dataset=tiny.prompts(),
            rollout_func=rollouts,
        )
    )
    trainer.train()
    return trainer, rollouts


@pytest.mark.engine
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_same_rollouts_leave_the_same_weights(case, tiny_model, tmp_path, monkeypatch, closing) -> None:
    """Norms are compared, because AdamW moves a weight even if its gradient consists of rounding errors."""
    import trl
    from trl.trainer import grpo_trainer

    import colograd

    class NoEngine:  # TRL's, which rollout_func replaces
        def __init__(self, **kwargs: Any) -> None: ...

        def sync_weights(self) -> None: ...

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", NoEngine)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    theirs, their_rollouts = run(trl.GRPOTrainer, trl.GRPOConfig(**settings(tmp_path / "trl", case)), tiny_model)
    config = colograd.GRPOConfig(**settings(tmp_path / "colograd", case))
    ours, our_rollouts = run(colograd.GRPOTrainer, config, tiny_model, closing)

    assert our_rollouts.asked == their_rollouts.asked
    logs = [[entry for entry in trainer.state.log_history if "grad_norm" in entry] for trainer in (theirs, ours)]
    for one, other in zip(*logs, strict=True):  # TRL has no reward to log where a step takes its rollouts again
        assert {name: other[name] for name in NAMED if name in one} == pytest.approx(
            {name: one[name] for name in NAMED if name in one}, rel=1e-3
        )
    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").named_parameters())
    for (name, one), (_, other) in zip(theirs.model.named_parameters(), ours.model.named_parameters(), strict=True):
        moved = (one - before[name]).norm()
        assert moved > 0 and (other - one).norm() < 1e-3 * moved, name
