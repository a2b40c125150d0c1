"""Tiny random vision-language models of families that train on text only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decoder_families
import tiny
import torch

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# family -> class, and the configurations of text, tower and model
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            **decoder_families.GATED_DELTA, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "rope_parameters": ROPE
            | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        },
        {**BLOCKS, "num_position_embeddings": 16},
        {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 32},
        {**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
        {"image_token_index": 5},
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_dim": 64, "block_dim": 64},
        {**TOWER, "model_type": "siglip2_vision_model", "num_patches": 16},
        {"image_token_id": 5},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {"model_type": "qwen2"},
        {**TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": 5},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "head_dim": 32, "global_head_dim": 64, "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16, "attention_k_eq_v": True, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 258,
        },
        {**TOWER, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 4, "default_output_length": 70},
        {"image_token_id": 5, "video_token_id": 6, "audio_token_id": 7},
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {"attention_bias": True, "rope_parameters": ROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}},
        {**BLOCKS, "image_size": 28, "patch_size": 14},
        {"image_token_id": 5},
    ),
}  # fmt: skip


def make(family: str) -> Any:
    import transformers

    name, text, tower, own = FAMILIES[family]
    tokenizer, kind = tiny.make_tokenizer(), getattr(transformers, name)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = kind(
        kind.config_class(
            text_config={**SHAPE, "vocab_size": len(tokenizer), **text, **ends}, vision_config=tower, **own, **ends
        )
    )
    with torch.no_grad():  # as `tiny.make_model`
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() >= 2 else parameter.add_(torch.rand_like(parameter) * 0.1)
    return model


def make_model(folder: Path, family: str) -> Path:
    """Save a random model and the tests' tokenizer, without a processor."""
    make(family).save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder
