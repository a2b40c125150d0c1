"""A saved model has its checkpoint's configuration, which `transformers.Trainer` changes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tiny
from transformers import GenerationConfig, LlamaConfig
from transformers.trainer_utils import align_special_tokens

from colograd import GRPOTrainer
from colograd.training.transformers_seam import CheckpointConfig

END, PAD = 256, 257  # of the tiny tokenizer, which names no beginning


def trained(config: dict, generation: dict, **tokens: str) -> SimpleNamespace:
    """Return a model whose configurations `transformers.Trainer` has changed."""
    model = SimpleNamespace(config=LlamaConfig(**config), generation_config=GenerationConfig(**generation))
    tokenizer = tiny.make_tokenizer()
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    kept = CheckpointConfig(model, tokenizer)
    model.config.use_cache = False
    align_special_tokens(model, tokenizer)
    kept.restore()
    return model


def test_tokens_that_the_tokenizer_lacks_stay() -> None:
    """Qwen's checkpoints name a BOS token and the tokenizers don't. Llama 3's have several EOS tokens."""
    ends = [7, END]
    checkpoint = {"bos_token_id": 3, "eos_token_id": ends, "pad_token_id": None}
    model = trained(checkpoint, checkpoint, pad_token="<end>")
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, ends, None)
    assert model.config.use_cache is True


def test_a_new_end_token_is_added() -> None:
    checkpoint = {"bos_token_id": 3, "eos_token_id": 7, "pad_token_id": 9}
    model = trained(checkpoint, checkpoint)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (END, [END, 7])
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (PAD, PAD)


@pytest.mark.engine
def test_a_saved_model_has_its_checkpoints_configuration(tmp_path, closing) -> None:
    folder = tiny.make_model(tmp_path / "model", family="qwen2")
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": 3, "eos_token_id": [END, 7]}))
    config = tiny.config(tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    trainer = closing(GRPOTrainer(str(folder), tiny.vowels, config, tiny.prompts()))
    trainer.train()
    trainer.save_model()
    for name in ("config.json", "generation_config.json"):
        before = json.loads((folder / name).read_text())
        for saved in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
            assert json.loads((saved / name).read_text()) == before
