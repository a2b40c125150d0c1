"""The coefficient of the load-balancing loss."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from colograd.config import GRPOConfig


def config(**changes: Any) -> GRPOConfig:
    return GRPOConfig(**({"output_dir": "unused", "report_to": "none"} | changes))


def test_router_coefficient_defaults_to_the_models_own() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    from colograd.policy.loading import Policy

    shape = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": 8,
    }  # fmt: skip
    routed = MixtralConfig(**shape, num_local_experts=2, num_experts_per_tok=1, router_aux_loss_coef=0.1)
    tokenizer = tiny.make_tokenizer()
    experts = Policy(MixtralForCausalLM(routed), tokenizer, "", False, "")
    plain = Policy(LlamaForCausalLM(LlamaConfig(**shape)), tokenizer, "", False, "")
    for asked, found in ((None, 0.1), (0.0, 0.0), (0.3, 0.3)):
        settings = config(router_aux_loss_coef=asked)
        assert experts.router_coef(settings) == found
        assert any("load-balancing" in line for line in experts.describe(settings, 1)) == bool(found)
    assert plain.router_coef(config()) == plain.router_coef(config(router_aux_loss_coef=0.0)) == 0.0
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.3, but LlamaForCausalLM returns no .*remove"):
        plain.router_coef(config(router_aux_loss_coef=0.3))
