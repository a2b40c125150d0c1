"""Checkpoints that are resumed in a different precision, and checkpoints within a round, through the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.training.adamw_split import AdamWSplit, join_master, split_master

pytestmark = pytest.mark.engine


class AtStart(TrainerCallback):
    """A trainer that copies the parameters and the optimizer's state before the first step."""

    def __init__(self) -> None:
        self.kind: Any = None
        self.parameters: dict[str, torch.Tensor] = {}
        self.state: dict[str, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        names = {id(p): name for name, p in kwargs["model"].named_parameters()}
        self.kind = type(optimizer)
        self.parameters = {name: p.detach().clone() for name, p in kwargs["model"].named_parameters()}
        for parameter, entry in optimizer.state.items():
            self.state[names[id(parameter)]] = {key: value.clone() for key, value in entry.items()}


def train(model: Path, folder: Path, dtype: str, optim: str, steps: int, resume: str | None = None) -> AtStart:
    """Train up to step ``steps``, which leaves a checkpoint."""
    look = AtStart()
    changes = {"model_init_kwargs": {"dtype": dtype}, "optim": optim, "max_steps": steps}
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=tiny.vowels,
        args=tiny.config(folder, save_strategy="steps", save_steps=1, **changes),
        train_dataset=tiny.prompts(),
        callbacks=[look],
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()
    return look


def saved(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The weights of a checkpoint, and its optimizer state by parameter name, in the parameter's shape."""
    weights, state = load_file(checkpoint / "model.safetensors"), tiny.optimizer_state(checkpoint)
    for name, entry in state.items():
        state[name] = {key: v.view(weights[name].shape) if v.dim() else v for key, v in entry.items()}
    return weights, state


@pytest.mark.slow  # test_adamw_split.py has the exact masters
def test_float32_to_split_to_float32_goes_on_from_the_exact_masters(tiny_model: Path, tmp_path: Path) -> None:
    moments = ("step", "exp_avg", "exp_avg_sq")
    train(tiny_model, tmp_path, "float32", "adamw_torch", steps=1)
    split = train(tiny_model, tmp_path, "bfloat16", "adamw_split", steps=2, resume="true")
    weights, state = saved(tmp_path / "checkpoint-1")
    assert split.kind is AdamWSplit and split.parameters.keys() == weights.keys() == split.state.keys()
    for name, expected in weights.items():
        assert expected.dtype == torch.float32
        assert torch.equal(split.parameters[name], split_master(expected)[0])
        assert torch.equal(join_master(split.parameters[name], split.state[name]["remainder"]), expected)
        assert all(torch.equal(split.state[name][key], state[name][key]) for key in moments)

    plain = train(tiny_model, tmp_path, "float32", "adamw_torch", steps=3, resume="true")
    weights, state = saved(tmp_path / "checkpoint-2")
    assert plain.kind is torch.optim.AdamW
    for name, rounded in weights.items():
        assert rounded.dtype == torch.bfloat16 and state[name]["step"] == 2
        assert torch.equal(plain.parameters[name], join_master(rounded, state[name]["remainder"]))
        assert plain.state[name].keys() == set(moments)
        assert all(torch.equal(plain.state[name][key], state[name][key]) for key in moments)
    assert any((plain.parameters[name] != rounded).any() for name, rounded in weights.items())
    _, state = saved(tmp_path / "checkpoint-3")
    assert all(entry.keys() == set(moments) and entry["step"] == 3 for entry in state.values())


# -- rounds of several steps


def of_rounds(model: Path, folder: Path, callbacks: list[TrainerCallback], **changes: Any) -> GRPOTrainer:
    """Four rounds of two steps in an epoch."""
    args = tiny.config(folder, num_iterations=2, save_strategy="epoch", **({"max_steps": -1} | changes))
    return GRPOTrainer(str(model), tiny.vowels, args, tiny.prompts(16), tiny.prompts(4), callbacks=callbacks)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.slow
def test_a_fraction_of_an_epoch_ends_with_a_round_and_its_checkpoint(tiny_model, tmp_path, closing) -> None:
    trainer = closing(of_rounds(tiny_model, tmp_path, [], num_train_epochs=0.4))
    trainer.train()
    assert trainer.state.max_steps == trainer.state.global_step == 4, "and not 3.2 of 8 steps, in the second round"
    assert checkpoints(tmp_path) == ["checkpoint-4"]


def test_stopping_mid_round_reports_the_missing_checkpoint(tiny_model, tmp_path, closing, capfd) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == at

    trainer, at = closing(of_rounds(tiny_model, tmp_path, [Stop()])), 3
    trainer.train()
    assert (trainer.state.global_step, checkpoints(tmp_path)) == (3, [])
    assert "the run was stopped at step 3, in the middle of a round" in capfd.readouterr().out
    at = 2
    trainer.train()
    assert (trainer.state.global_step, checkpoints(tmp_path)) == (2, ["checkpoint-2"])
    assert "in the middle of a round" not in capfd.readouterr().out


def test_the_best_weights_are_those_that_were_evaluated(tiny_model, tmp_path, closing) -> None:
    held: dict[int, torch.Tensor] = {}

    class Keep(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            held[state.global_step] = model.state_dict()["model.norm.weight"].clone()

    changes = {"save_strategy": "best", "metric_for_best_model": "reward", "eval_strategy": "steps", "eval_steps": 2}
    args = tiny.config(tmp_path, num_iterations=2, load_best_model_at_end=True, **changes)
    trainer = closing(
        GRPOTrainer(str(tiny_model), tiny.vowels, args, tiny.prompts(16), tiny.prompts(4), callbacks=[Keep()])
    )
    trainer.train()
    best = trainer.state.best_global_step
    assert Path(trainer.state.best_model_checkpoint).name == f"checkpoint-{best}" in checkpoints(tmp_path)
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(saved, held[best]) and torch.equal(saved, trainer.model.state_dict()["model.norm.weight"].cpu())


def test_a_checkpoint_that_was_being_replaced_is_found(tiny_model: Path, tmp_path: Path, closing, capfd) -> None:
    """The process died between the two renames of a second save of the same step."""
    train(tiny_model, tmp_path, "float32", "adamw_torch", 1)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".replaced-checkpoint-1")
    config = tiny.config(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts()))
    trainer.train(resume_from_checkpoint="auto")
    assert "checkpoint-1 is at the last of 1 steps" in capfd.readouterr().out


def test_a_score_that_is_set_on_one_trainer_is_called(tiny_model: Path, tmp_path: Path, closing) -> None:
    config = tiny.config(tmp_path, max_steps=1)
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts()))
    trainer.score = lambda group: torch.full((len(group.rollouts), 1), 3.0)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 3.0
