"""Callbacks get the same events as from transformers' own loop, in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from colograd import GRPOTrainer

pytestmark = pytest.mark.engine

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_prediction_step"]
# Twelve steps of an epoch, and two epochs: 24 prompts, two a step.
WHEN = {
    "num_train_epochs": 2, "max_steps": -1, "logging_steps": 5, "eval_strategy": "steps", "eval_steps": 8,
    "save_strategy": "steps", "save_steps": 8, "eval_on_start": True, "report_to": "none", "save_only_model": True,
}  # fmt: skip


class Events(TrainerCallback):
    """Records each event with its step, its epoch, and the requests in the callbacks' control."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []


def _keep(name: str) -> Any:
    def event(self: Events, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asks = control.should_log, control.should_evaluate, control.should_save, control.should_training_stop
        self.seen.append((name, state.global_step, round(state.epoch or 0.0, 6), *asks))

    return event


for _name in EVENTS:
    setattr(Events, _name, _keep(_name))


def events_of_transformers(model: Path, folder: Path) -> list[tuple[Any, ...]]:
    rows = torch.arange(24 * 8).view(24, 8) % 50
    data = Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})
    events = Events()
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=TrainingArguments(output_dir=str(folder), per_device_train_batch_size=2, use_cpu=True, **WHEN),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        callbacks=[events],
    )
    trainer.train()
    return events.seen


def test_callbacks_get_transformers_events_in_its_order(tiny_model: Path, tmp_path: Path, closing: Any) -> None:
    events = Events()
    changes = {"prompts_per_step": 2, "steps_per_generation": 2, "num_iterations": 2} | WHEN
    trainer = closing(
        GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=tiny.vowels,
            args=tiny.config(tmp_path / "ours", **changes),
            train_dataset=tiny.prompts(12),
            eval_dataset=tiny.prompts(2),
            callbacks=[events],
        )
    )
    trainer.train()
    assert events.seen == events_of_transformers(tiny_model, tmp_path / "theirs")
