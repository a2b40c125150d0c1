"""Vision-language families without image training are trained on text, like text models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_cases
import pytest
import seeing_families
import tiny
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText

from colograd import GRPOTrainer
from colograd.policy.loading import load_policy
from colograd.policy.lora import wrap
from colograd.policy.towers import set_text_alone

FAMILIES = tuple(seeing_families.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_text_is_trained_in_packed_rows_and_its_tower_is_frozen(family: str, tmp_path: Path) -> None:
    folder = seeing_families.make_model(tmp_path / "model", family)
    policy = load_policy(str(folder), None, tiny.config(tmp_path / "run"))
    assert policy.why_padded == "" and policy.processor is None
    trained = {id(p) for p in policy.model.parameters() if p.requires_grad}
    decoder, head = policy.model.get_decoder(), policy.model.get_output_embeddings()
    assert trained == {id(p) for part in (decoder, head) for p in part.parameters()}


def test_an_adapter_is_on_its_text_alone() -> None:
    """The adapter leaves the tower out, although the tower has modules of the same names."""
    seeing = seeing_families.make("mistral3")
    set_text_alone(seeing, has_images=False)
    model = wrap(seeing, LoraConfig(target_modules=["q_proj", "v_proj"]), 0)
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(adapted) == 2 * 2 * 2 and all("language_model" in name for name in adapted)


@pytest.mark.slow
@pytest.mark.engine
@image_cases.needs("torchvision")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_on_text(family: str, tmp_path: Path, closing: Callable[[Any], Any], tried: Any) -> None:
    """Sampler and trainer agree, the vision tower is unchanged, and transformers loads the saved model."""
    folder = seeing_families.make_model(tmp_path / "model", family)
    bfloat16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch"} if family == "qwen3_5" else {}
    config = tiny.config(tmp_path / "run", max_steps=2, max_completion_length=8, disable_dropout=True, **bfloat16)
    trainer = closing(GRPOTrainer(str(folder), tiny.vowels, config, tiny.prompts()))
    trainer.train()
    name = "sampling/sampling_logp_difference/mean"
    differences = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(differences) == 2 and max(differences) < (0.02 if bfloat16 else 1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(path, dtype=trainer.model.dtype).named_parameters())
        for path in (folder, tmp_path / "saved")
    )
    assert all(torch.equal(after[name], p) for name, p in trainer.model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("language_model" in name or "lm_head" in name for name in moved)
    tried(family, packed="of text alone", shared="of text alone", saved="loaded by plain transformers")
