"""Adapters of mixtures of experts on a base of 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decoder_families
import pytest
import tiny
import torch
from needs import needs
from peft import LoraConfig
from quantized_cases import NF4
from transformers import BitsAndBytesConfig

from colograd import GRPOTrainer

pytestmark = [pytest.mark.engine, needs("experts")]

# Families with a load-balancing loss in transformers.
BALANCED = ("afmoe", "flex_olmo", "mellum", "minimax_m2")


MIXTURES = (*BALANCED, "deepseek_v3", "glm4_moe_lite", "granitemoe", "hunyuan_v1_moe", "lfm2_moe", "llama4_text")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_trains_an_adapter_on_a_base_of_4_bits(model_type: str, tmp_path: Path, closing: Any) -> None:
    """The run has the load-balancing loss, or one clear error if transformers has none."""
    model = decoder_families.make_model(tmp_path / "model", model_type)
    base = {"dtype": "float32", "quantization_config": BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.float32)}

    def trainer(**changes: Any) -> GRPOTrainer:
        config = tiny.config(
            tmp_path / "run", max_steps=2, max_completion_length=8, beta=0.1, model_init_kwargs=base, **changes
        )
        adapter = LoraConfig(r=4, target_modules="all-linear")
        return closing(GRPOTrainer(str(model), tiny.vowels, config, tiny.prompts(), peft_config=adapter))

    if model_type not in BALANCED:
        with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.01, but .* and so has no load-balancing loss"):
            trainer(router_aux_loss_coef=0.01)
    found = trainer(**{"router_aux_loss_coef": 0.01} if model_type in BALANCED else {})
    found.train()
    steps = [entry for entry in found.state.log_history if "loss" in entry]
    assert len(steps) == 2 and all(step["sampling/sampling_logp_difference/mean"] < 1e-5 for step in steps)
    assert all(("aux_loss" in step) == (model_type in BALANCED) for step in steps)
