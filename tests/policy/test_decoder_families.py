"""Every decoder family that transformers and vLLM both have, tiny and random: trained, or refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import decoder_families
import launcher
import plain_vllm
import pytest
import tiny
import torch
from needs import case
from paths import SCRIPTS
from peft import LoraConfig

from colograd import GRPOTrainer

pytestmark = pytest.mark.engine
SCRIPT = SCRIPTS / "one_family.py"
# Fast examples of families with other names or layouts in vLLM than in transformers: transposed projections. A slow
# test below has all families.
QUICK = ("gpt2",)
# transformers can't build or run these random models, or refuses their tokenizer without a first token.
BROKEN = ("dbrx", "qwen4_exp_text", "cwm")
TRAINED = 1e-3  # nats, mean: float32; bfloat16 where a kernel of the engine wants it


def outcome(model_type: str, folder: Path) -> dict[str, Any]:
    done = launcher.run(SCRIPT, model_type, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return found


@pytest.mark.parametrize("model_type", QUICK)
def test_other_names_and_layouts_are_found_and_proved(model_type: str, tmp_path: Path) -> None:
    found = outcome(model_type, tmp_path)
    assert found["status"] == "trained" and found["difference"] < 1e-5, found
    assert found["resumed"] and found["plain"], found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*decoder_families.model_types()} - {*BROKEN}))
def test_a_family_is_trained_or_refused_in_a_line(model_type: str, tmp_path: Path) -> None:
    """A saved model loads in plain transformers and in plain vLLM, which say the same. A refusal is an error that the
    command prints as a line: see `colograd.train.start`."""
    found = outcome(model_type, tmp_path)
    if found["status"] == "trained":
        assert found["difference"] < (TRAINED if found["dtype"] == "float32" else 0.1), found
        assert found["resumed"] and found["plain"], found
        dtype, checkpoint = str(found["dtype"]), tmp_path / "run" / "checkpoint-2"
        logprobs = plain_vllm.prompt_logprobs(checkpoint, found["ids"], tmp_path, dtype=dtype)
        apart = (logprobs - torch.tensor(found["logprobs"])).abs().mean()
        assert float(apart) < (TRAINED if dtype == "float32" else 0.1)
    else:
        assert found["status"] in ("ValueError", "RuntimeError") and len(str(found["message"])) > 40, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "lfm2",
        case("granitemoehybrid", "experts"),
        case("deepseek_v3", "experts"),
        "gpt_neox",
        case("minimax_m2", "experts"),
    ],
)
def test_two_ranks_end_with_the_same_bits_however_they_share(model_type: str, tmp_path: Path) -> None:
    """Families with states, latent attention and experts with other names, unsharded and under FSDP."""
    model, found = decoder_families.make_model(tmp_path / "model", model_type), []
    for sharding in ("none", "gradients", "fsdp"):
        (tmp_path / sharding).mkdir()
        found += launcher.on_two_ranks(model, tmp_path / sharding, sharding)
    assert len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "lfm2",
        case("granitemoehybrid", "experts"),
        case("deepseek_v3", "experts"),
        "gpt_neox",
        case("llama4_text", "experts"),
    ],
)
def test_an_adapter_on_all_linear_layers_agrees_with_its_sampler(model_type: str, tmp_path: Path, closing: Any) -> None:
    """The adapter covers the projections around a recurrent state and of latent attention too."""
    model = decoder_families.make_model(tmp_path / "model", model_type)
    config = tiny.config(tmp_path / "run", max_steps=2, max_completion_length=8, beta=0.1)
    adapter = LoraConfig(r=4, target_modules="all-linear")
    trainer = closing(GRPOTrainer(str(model), tiny.vowels, config, tiny.prompts(), peft_config=adapter))
    trainer.train()
    name = "sampling/sampling_logp_difference/mean"
    differences = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(differences) == 2 and max(differences) < 1e-5
