"""Checkpoints that one precision wrote and another goes on from, through the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.optim import AdamWSplit, join_master, split_master

pytestmark = pytest.mark.engine


class AtStart(TrainerCallback):
    """Keeps copies of the parameters and the optimizer's state as the first step finds them."""

    def __init__(self) -> None:
        self.kind: Any = None
        self.names: list[str] = []  # in the order of the saved state
        self.parameters: dict[str, torch.Tensor] = {}
        self.state: dict[str, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        names = {id(p): name for name, p in kwargs["model"].named_parameters()}
        self.kind = type(optimizer)
        self.names = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
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


def saved(checkpoint: Path, names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The weights of a checkpoint, and its optimizer state by parameter name."""
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    return load_file(checkpoint / "model.safetensors"), {name: state[index] for index, name in enumerate(names)}


def test_float32_to_split_to_float32_goes_on_from_the_exact_masters(tiny_model: Path, tmp_path: Path) -> None:
    moments = ("step", "exp_avg", "exp_avg_sq")
    train(tiny_model, tmp_path, "float32", "adamw_torch", steps=1)
    split = train(tiny_model, tmp_path, "bfloat16", "adamw_split", steps=2, resume="true")
    weights, state = saved(tmp_path / "checkpoint-1", split.names)
    assert split.kind is AdamWSplit and split.parameters.keys() == weights.keys() == split.state.keys()
    for name, expected in weights.items():
        assert expected.dtype == torch.float32
        assert torch.equal(split.parameters[name], split_master(expected)[0])
        assert torch.equal(join_master(split.parameters[name], split.state[name]["remainder"]), expected)
        assert all(torch.equal(split.state[name][key], state[name][key]) for key in moments)

    plain = train(tiny_model, tmp_path, "float32", "adamw_torch", steps=3, resume="true")
    weights, state = saved(tmp_path / "checkpoint-2", plain.names)
    assert plain.kind is torch.optim.AdamW
    for name, rounded in weights.items():
        assert rounded.dtype == torch.bfloat16 and state[name]["step"] == 2
        assert torch.equal(plain.parameters[name], join_master(rounded, state[name]["remainder"]))
        assert plain.state[name].keys() == set(moments)
        assert all(torch.equal(plain.state[name][key], state[name][key]) for key in moments)
    assert any((plain.parameters[name] != rounded).any() for name, rounded in weights.items())
    _, state = saved(tmp_path / "checkpoint-3", plain.names)
    assert all(entry.keys() == set(moments) and entry["step"] == 3 for entry in state.values())
