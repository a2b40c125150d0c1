"""Muon on a split master: torch's own on a float32 master, bit for bit, and AdamW's for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from colograd import GRPOTrainer
from colograd.extensions.muon.optimizer import MOMENTUM, MuonSplit, matrices_of
from colograd.training.adamw_split import AdamWSplit, accumulate_in_float32, join_master, optimizer_of

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def loaded(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def give_gradients(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def made(model: Any) -> MuonSplit:
    return MuonSplit(model.parameters(), matrices_of(model), **SETTINGS)


def master_of(optimizer: MuonSplit, parameter: torch.Tensor) -> torch.Tensor:
    remainder = optimizer.state[parameter].get("remainder")
    return parameter.detach() if remainder is None else join_master(parameter.detach(), remainder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_are_those_of_torch_s_optimizers_on_a_float32_model(tiny_qwen: Path, dtype: torch.dtype) -> None:
    mine, theirs = loaded(tiny_qwen, dtype), loaded(tiny_qwen, dtype).float()
    accumulate_in_float32(mine.parameters())
    matrices = matrices_of(theirs)
    rest = [p for p in theirs.parameters() if all(p is not m for m in matrices)]
    assert len(matrices) == 14 and {p.dim() for p in rest} == {1, 2}, "the embedding and the head are AdamW's"
    others = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **SETTINGS),
        torch.optim.AdamW(rest, **SETTINGS),
    ]
    optimizer = made(mine)
    for step in range(5):
        if step == 3:  # a checkpoint's state in another object
            optimizer, before = made(mine), optimizer
            optimizer.load_state_dict(before.state_dict())
        for model in (mine, theirs):
            give_gradients(model, step)
        for each in (optimizer, *others):
            each.step()
    for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(master_of(optimizer, own), other)
    assert set(optimizer.state[matrices_of(mine)[0]]) == {MOMENTUM} | (
        {"remainder"} if dtype == torch.bfloat16 else set()
    )


def test_another_optimizer_s_state_and_another_s_place_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = loaded(tiny_model, torch.bfloat16)
    accumulate_in_float32(model.parameters())
    other = AdamWSplit(model.parameters(), **SETTINGS)
    give_gradients(model, 0)
    other.step()
    with pytest.raises(ValueError, match=r"of a matrix has step, exp_avg, .* but `optim: muon` needs momentum_buffer"):
        made(model).load_state_dict(other.state_dict())
    config = tiny.config(tmp_path, optim="muon", model_init_kwargs=None)
    assert config.policy_dtype == "bfloat16"
    kind, given = optimizer_of(config, model)
    assert kind is MuonSplit and len(given["matrices"]) == 14
    with pytest.raises(ValueError, match=r"optim is 'muon', .* set optim: adamw_split"):
        optimizer_of(config, peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")))
    with pytest.raises(ValueError, match="a rank updates slices of parameters, which that optimizer can't"):
        tiny.config(tmp_path, optim="muon", sharding="gradients")


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tiny_model: Path, tmp_path: Path, closing: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "model_init_kwargs": None, "learning_rate": 1e-3}
    config = tiny.config(tmp_path, optim="muon", **settings)
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts()))
    before = [p.detach().clone() for p in matrices_of(trainer.model)]  # a norm's weight of 1 rounds a small step away
    trainer.train()
    final = [p.detach().clone() for p in trainer.model.parameters()]
    assert before[0].dtype == torch.bfloat16 and not any(map(torch.equal, before, matrices_of(trainer.model)))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(final, trainer.model.parameters(), strict=True))
