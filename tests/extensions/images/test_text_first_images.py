"""Families that are trained like text models in runs without images. Qwen3.5's layers carry a state (in bfloat16, the
only dtype of vLLM's kernel on a CPU), Mistral 3 writes a picture as rows of tokens, InternVL cuts pictures into tiles,
and Gemma 4 comes small, large and with experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_images
import torch
from image_cases import compare_with_what_was_saved, needs
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor

from colograd import GRPOTrainer
from colograd.extensions.lora.weights import AdapterWeights
from colograd.policy import towers
from colograd.weights.sync import MergedWeights

NAME = "sampling/sampling_logp_difference/mean"
BFLOAT16: dict[str, Any] = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch"}


def suppress(folder: Path, tokens: list[int] | None) -> None:
    """Suppress tokens in generations, as Gemma 4's published configurations do. vLLM removes them from the logits."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suppress_tokens": tokens}))


@pytest.mark.slow
@pytest.mark.engine
@needs("torchvision")
@pytest.mark.parametrize(
    ("family", "dtype", "most"),
    [
        ("qwen3_5_vl", torch.bfloat16, 0.02),
        ("mistral3_vl", torch.float32, 1e-5),
        ("internvl_vl", torch.float32, 1e-5),
        ("gemma4_vl", torch.float32, 1e-5),
        ("gemma4_both_ways", torch.float32, 1e-5),
        ("gemma4_experts", torch.float32, 1e-5),
    ],
)
def test_it_trains_resumes_and_is_saved(
    family: str, dtype: torch.dtype, most: float, tmp_path: Path, closing: Callable[[Any], Any], tried: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Weights bit-equal after each publish, its tower's too; sampler and trainer as near as in text. A saved Gemma 4
    has the same log-probabilities in plain transformers and in plain vLLM."""
    model = tiny_images.make_model(tmp_path / "model", family)
    if family.startswith("gemma4"):
        suppress(model, [*range(5, 25)])
    changes, found = BFLOAT16 if dtype == torch.bfloat16 else {}, []
    for resumed in (None, str(tmp_path / "run" / "checkpoint-2")):
        config = tiny.config(
            tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1, full_determinism=True, **changes
        )
        pictures = 1 if family == "internvl_vl" else 2  # of up to three tiles
        trainer = closing(GRPOTrainer(str(model), tiny.vowels, config, tiny_images.prompts(8, images=pictures)))
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if towers.sees(name)}
        heard = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "audio" in name}
        assert bool(heard) == (family == "gemma4_vl")
        assert not any("audio" in part.name for part in trainer.weights.slices)
        trainer.train(resume_from_checkpoint=resumed)
        trainer.publish()
        assert trainer.policy.why_padded == "" and trainer.weights.differing() == []
        after = dict(trainer.model.named_parameters())
        assert before and any(not torch.equal(after[name], value) for name, value in before.items())
        found.append({name: p.detach().clone() for name, p in after.items()})
        steps = [entry[NAME] for entry in trainer.state.log_history if NAME in entry]
        assert len(steps) == 3 and max(steps) < most
        if resumed and family.startswith("gemma4"):
            suppress(tmp_path / "run" / "checkpoint-3", None)
            compare_with_what_was_saved(trainer, tmp_path / "run" / "checkpoint-3", tmp_path)
        trainer.close()
        assert all(torch.equal(after[name], value) for name, value in heard.items())
    assert all(torch.equal(found[0][name], p) for name, p in found[1].items())
    assert not family.startswith("gemma4") or "from images' sizes" not in "".join(capfd.readouterr()), "counted"
    saved, alone = tmp_path / "run" / "checkpoint-3", "loaded by plain transformers"
    plain = dict(AutoModelForImageTextToText.from_pretrained(saved, dtype=dtype).named_parameters())
    assert all(torch.equal(plain[name], p) for name, p in found[1].items())
    assert hasattr(AutoProcessor.from_pretrained(saved), "image_processor")
    tried(family, "shared", "images", saved="" if family.startswith("gemma4") else alone, resumed="")


@pytest.mark.slow
@pytest.mark.engine
@needs("torchvision")
@pytest.mark.parametrize(
    ("family", "targets", "kind"),
    [
        ("gemma4_vl", r".*language_model.*\.(q|k|v)_proj", AdapterWeights),
        ("gemma4_vl", "all-linear", MergedWeights),  # on what sees, too, and not on what hears
        ("gemma4_both_ways", r".*language_model.*\.(q|k)_proj", MergedWeights),  # vLLM would adapt keys, not as values
    ],
)
def test_an_adapter_trains(
    family: str, targets: str, kind: type, tmp_path: Path, closing: Callable[[Any], Any], tried: Any
) -> None:
    model = tiny_images.make_model(tmp_path / "model", family)
    lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    config = tiny.config(tmp_path / "run", max_steps=3, learning_rate=1e-2)
    trainer = closing(GRPOTrainer(str(model), tiny.vowels, config, tiny_images.prompts(8), peft_config=lora))
    assert type(trainer.weights) is kind
    assert not [name for name, p in trainer.model.named_parameters() if p.requires_grad and "audio" in name]
    trainer.train()
    steps = [entry[NAME] for entry in trainer.state.log_history if NAME in entry]
    assert len(steps) == 3 and max(steps) < 1e-5
    trainer.close()
    if kind is AdapterWeights:
        tried(family, "lora_served")
    else:
        tried(family, "lora_merged")
