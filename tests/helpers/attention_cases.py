"""Small models, ragged groups, and a copy of a model with packed rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from colograd.batch import FinishReason, Group, Rollout, ScoredGroup
from colograd.policy import attention

VOCABULARY = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WINDOW = 5  # a window ends inside completions and inside prompts
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    "mistral, window": (MistralForCausalLM, MistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW)),
    "qwen2, window in one layer": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    # One layer of each type with its own rotary base; scores by query_pre_attn_scalar, not head_dim; capped logits.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SHAPE,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=WINDOW,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
            query_pre_attn_scalar=40,
            final_logit_softcapping=4.0,
        ),
    ),
    "phi": (PhiForCausalLM, PhiConfig(**SHAPE, partial_rotary_factor=0.5)),  # biases, also in the head; parallel MLP
    "phi3": (Phi3ForCausalLM, Phi3Config(**SHAPE)),
    "phi3, window": (Phi3ForCausalLM, Phi3Config(**SHAPE, sliding_window=WINDOW)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SHAPE, no_rope_layers=[1, 0])),  # the second layer: no positions
}


def make_model(family: str) -> Any:
    """Weights are larger than the usual 0.02, so that attention isn't nearly uniform."""
    cls, config = FAMILIES[family]
    torch.manual_seed(0)
    model = cls(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn_like(parameter))
    model.set_attn_implementation("sdpa")
    return model.train()


def packed_copy(model: Any, checkpointing: bool = False) -> Any:
    packed = copy.deepcopy(model)
    packed.set_attn_implementation(attention.NAME)
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
    return packed


def make_groups() -> list[ScoredGroup]:
    generator = torch.Generator().manual_seed(3)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCABULARY, (length,), generator=generator).tolist())

    groups = []
    for position, (prompt, *completions) in enumerate(([12, 11, 1, 7], [1, 4, 9, 2], [6, 1, 8, 8])):
        prompt_ids = tokens(prompt)
        rollouts = tuple(
            Rollout(prompt_ids, tokens(n), torch.zeros(n), torch.ones(n, dtype=torch.bool), FinishReason.STOP, 0)
            for n in completions
        )
        advantages = torch.randn(len(rollouts), generator=generator)
        groups.append(ScoredGroup(Group({}, rollouts, position), torch.zeros(len(rollouts), 1), advantages))
    return groups
