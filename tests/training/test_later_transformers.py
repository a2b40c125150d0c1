"""Methods that later versions of transformers call with other arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel, Trainer

from colograd.policy.loading import Policy
from colograd.training.transformers_seam import SeamTrainer


def test_a_rank_that_saves_nothing_returns() -> None:
    """Since 5.24 `_save` is called on all ranks. This rank would fail at anything that a save needs."""
    seam: Any = SimpleNamespace(args=SimpleNamespace(should_save=False))
    SeamTrainer._save(seam, "nowhere")


def test_a_private_repository_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def later(self: Any, token: str | None = None, private: bool | None = None) -> None:
        calls.append((token, private))

    monkeypatch.setattr(Trainer, "init_hf_repo", later)
    trainer = object.__new__(SeamTrainer)
    trainer.init_hf_repo(token="t", private=True)
    trainer.init_hf_repo()
    assert calls == [("t", True), (None, None)]


def test_some_layers_are_checkpointed_by_a_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 5.23 `gradient_checkpointing_enable` takes its arguments as `**kwargs`, without names."""
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", lambda self, kwargs=None, **others: None)
    model: Any = SimpleNamespace(supports_gradient_checkpointing=True)
    assert Policy(model, model, "", untouched=True, why_padded="").checkpointing == (0, 4, 2, 1)
