"""Tiny random models of every decoder family that transformers and vLLM both have."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import tiny
import torch

# A configuration gets the sizes whose names it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "kv_channels"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"), 256),
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 2,
    # multi-head latent attention: vLLM's kernel for CPUs takes one size
    **dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32),
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    # layers with a state
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    # per-layer embeddings, windows
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 258,
    "sliding_window": 8,
}
WINDOWS = ("sliding_attention", "full_attention")
GATED_DELTA = {"num_hidden_layers": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Further settings that a family needs.
OWN: dict[str, dict[str, Any]] = {
    "cwm": {"bos_token_id": 0},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "head_dim": 64, "first_k_dense_replace": 1},
    "falcon": {"num_kv_heads": 1, "multi_query": True, "ffn_hidden_size": 256},
    "gemma3n_text": {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "layer_types": list(WINDOWS)},
    "gemma4_text": {"num_experts": None},
    "glm4_moe": {"head_dim": 32},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_dim": 64, "block_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "mimo_v2_flash": {"layer_types": ["full_attention", "full_attention"], "num_key_value_heads": 2},
    "phi": {"intermediate_size": 256},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), GATED_DELTA),
    "qwen4_exp_text": {"num_hidden_layers": 4, "ngram_vocab_size_base": 512},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "attention_head_dim": 64},
}  # fmt: skip


def model_types() -> dict[str, str]:
    """Return the architecture's class by model type, preferring classes of text models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import registry

    known = {**registry._TEXT_GENERATION_MODELS, **registry._TRANSFORMERS_SUPPORTED_MODELS}
    found: dict[str, str] = {}
    for model_type, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (classes,) if isinstance(classes, str) else classes:
            if name in known:
                found[model_type] = name
    return {kind: name for kind, name in found.items() if f"{kind}_text" not in found}


def make_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    tokenizer = tiny.make_tokenizer()
    cls = CONFIG_MAPPING[model_type]
    names = set(inspect.signature(cls).parameters) | set(getattr(cls, "attribute_map", {}))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    given = {name: value for name, value in SIZES.items() if name in names}
    given |= {"vocab_size": len(tokenizer), **ends, **OWN.get(model_type, {})}
    return cls(**given)


def build(model_type: str) -> Any:
    """Build a model as its class does."""
    import transformers

    return getattr(transformers, model_types()[model_type])(make_config(model_type))


def make_model(folder: Path, model_type: str) -> Path:
    torch.manual_seed(0)
    model = build(model_type)
    with torch.no_grad():  # as `tiny.make_model`
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() >= 2 else parameter.add_(torch.rand_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder
