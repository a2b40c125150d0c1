"""Random models of many architectures, and ragged groups for their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_cases
import torch
import transformers as hf
from attention_cases import VOCABULARY

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup

SHAPE: dict[str, Any] = {**attention_cases.SHAPE, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PACKED: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, head_dim=16)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )
    ),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, **EXPERTS)),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(
            **SHAPE, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            n_shared_experts=1, first_k_dense_replace=1,
        )
    ),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
        )
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SHAPE, **EXPERTS, head_dim=16, sliding_window=4)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SHAPE, head_dim=16, attn_logit_softcapping=2.0, sliding_window=5)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHAPE, head_dim=16, final_logit_softcapping=4.0)),
}  # fmt: skip
GATED_DELTA = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
# models with recurrent layers
RECURRENT: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SHAPE | GATED_DELTA)),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeForCausalLM(
        hf.Qwen3_5MoeTextConfig(
            **SHAPE | GATED_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridForCausalLM(
        hf.GraniteMoeHybridConfig(
            **SHAPE | EXPERTS | MAMBA, layer_types=["mamba", "attention"], mamba_d_head=32, shared_intermediate_size=32
        )
    ),
    "falcon_h1": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(**SHAPE, **MAMBA, mamba_d_ssm=64, mamba_d_head=16, lm_head_multiplier=0.5)
    ),
    "mamba2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=32,
            n_groups=1, chunk_size=8, bos_token_id=1, eos_token_id=2,
        )
    ),
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
}  # fmt: skip
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "olmoe", "qwen2_moe")


def make(build: Callable[[], Any]) -> Any:
    """Make random weights, so that each token's distribution depends on its context."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "A_log" not in name:
                parameter.mul_(4.0)
    return model.train()


def make_groups() -> list[ScoredGroup]:
    generator = torch.Generator().manual_seed(3)
    groups = []
    for position, (prompt, *completions) in enumerate(([12, 11, 1, 7], [1, 4, 9, 2], [6, 1, 8, 8])):
        draw = [tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in (prompt, *completions)]
        rollouts = tuple(
            Rollout(draw[0], ids, torch.zeros(len(ids)), torch.ones(len(ids)).bool(), FinishReason.STOP, 0)
            for ids in draw[1:]
        )
        advantages = torch.randn(len(rollouts), generator=generator)
        groups.append(ScoredGroup(Group({}, rollouts, position), torch.zeros(len(rollouts), 1), advantages))
    return groups
