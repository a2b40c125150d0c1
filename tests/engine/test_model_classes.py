"""vLLM runs some families with transformers' own classes and decorates them. The policy's class stays undecorated."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoTokenizer, SmolLM3Config, SmolLM3ForCausalLM
from transformers.models.smollm3 import modeling_smollm3

from colograd import GRPOTrainer


@pytest.fixture(scope="module")
def smollm3(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("smollm3")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, no_rope_layers=[1, 0], pad_token_id=0, bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    SmolLM3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_family_of_the_transformers_backend_trains(smollm3: Path, tmp_path: Path, eager: bool) -> None:
    """Two trainers in one process, compiled by vLLM: the next model gets transformers' undecorated class again."""
    kind = modeling_smollm3.SmolLM3Model
    before = kind.__bases__, kind.__init__, kind.__call__
    for run in range(2):
        more: dict[str, Any] = {"vllm_engine_kwargs": {"enforce_eager": eager}}
        config = tiny.config(tmp_path / f"{run}", max_steps=2, **more)
        with contextlib.closing(GRPOTrainer(str(smollm3), tiny.vowels, config, tiny.prompts())) as trainer:
            trainer.train()
            logged = [e for e in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in e]
            assert max(e["sampling/sampling_logp_difference/mean"] for e in logged) < 1e-5
            assert type(trainer.model.model) is kind and not hasattr(trainer.model.model, "do_not_compile")
        assert (kind.__bases__, kind.__init__, kind.__call__) == before
