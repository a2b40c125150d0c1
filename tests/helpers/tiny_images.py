"""Vision-language models that are small enough for a test, with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from PIL import Image

from colograd.batch import ModelInput
from colograd.extensions.images.rider import Images
from colograd.policy.row_proof import install_steps

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
IDEFICS3 = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<row_1_col_1>")
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
INTERNVL = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
MISTRAL3 = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
GEMMA3 = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA4 = {
    "boi": "<|image>",
    "eoi": "<image|>",
    "image": "<|image|>",
    "boa": "<|audio>",
    "eoa": "<audio|>",
    "audio": "<|audio|>",
}
SIDE = 32  # pixels of an image that needs the fewest tokens
WINDOWS = ("sliding_attention", "full_attention")
ONE_TILE = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": False}


def make_model(folder: Path, family: str, seed: int = 0, **shape: Any) -> Path:
    """Save a random model and its processor."""
    model, tokenizer = random_model(family, seed, **shape)
    model.save_pretrained(folder)
    if family == "gemma3_vl":
        _name_as_published(folder / "model.safetensors")
    PROCESSORS[family](tokenizer).save_pretrained(folder)
    return folder


def _name_as_published(file: Path) -> None:
    """Rename a tower's weights as in published checkpoints, because vLLM doesn't know transformers' own names."""
    from safetensors.torch import load_file, save_file

    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): of for name, of in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def random_model(family: str, seed: int = 0, **shape: Any) -> tuple[Any, Any]:
    """Make a random model of the family, and its tokenizer.

    Args:
        shape: of the language model; ``vision``: of the tower, by the family's names.
    """
    torch.manual_seed(seed)
    model, tokenizer = FAMILIES[family](
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            **shape,
        }
    )
    with torch.no_grad():  # see `tiny.make_model`
        for parameter in model.parameters():
            if parameter.dim() >= 2 and not parameter.any():  # e.g. Gemma 3's projector, which would hide the images
                torch.nn.init.normal_(parameter, std=0.1)
            parameter.mul_(3.0) if parameter.dim() >= 2 else parameter.add_(torch.rand_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():  # Gemma 4's bounds and scales
            if name.endswith(("input_min", "output_min", "input_max", "output_max")):
                buffer.fill_(2.0 if name.endswith("max") else -2.0)
            elif name.endswith(("std_bias", "std_scale", "layer_scalar")):
                buffer.add_(torch.rand_like(buffer) * 0.1)
    install_steps(model)
    return model.eval(), tokenizer


def _tokenizer(special: tuple[str, ...], placeholder: str, **named: str) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    for name, token in named.items():
        tokenizer.add_special_tokens({name: token})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    return tokenizer


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _idefics3(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images of 4 tokens."""
    import transformers as hf

    return _in_tiles(hf.Idefics3Config, hf.Idefics3ForConditionalGeneration, shape)


def _smolvlm(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images in tiles, as in Idefics3."""
    import transformers as hf

    return _in_tiles(hf.SmolVLMConfig, hf.SmolVLMForConditionalGeneration, shape)


def _in_tiles(config_class: Any, model_class: Any, shape: dict[str, Any]) -> tuple[Any, Any]:
    tokenizer, seeing = _tokenizer(IDEFICS3, "<image>"), shape.pop("vision", {})
    ids = tokenizer.convert_tokens_to_ids
    text = {"model_type": "llama", "head_dim": 32, **_ends(tokenizer), **shape}
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 8, **seeing,
    }  # fmt: skip
    config = config_class(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=ids("<image>"),
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    return model_class(config), tokenizer


def _idefics3_processor(tokenizer: Any) -> Any:
    import transformers as hf
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return hf.Idefics3Processor(
        Idefics3ImageProcessorPil(**ONE_TILE), tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )


def _smolvlm_processor(tokenizer: Any) -> Any:
    import transformers as hf

    return hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**ONE_TILE), tokenizer, hf.SmolVLMVideoProcessor(),
        image_seq_len=4, chat_template=tokenizer.chat_template,
    )  # fmt: skip


def _qwen2_5_vl(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images with a token for each 28 x 28 pixels, and M-RoPE positions."""
    import transformers as hf

    tokenizer, seeing = _tokenizer(QWEN, "<|vision_start|><|image_pad|><|vision_end|>"), shape.pop("vision", {})
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
        "out_hidden_size": shape["hidden_size"], "fullatt_block_indexes": [1], "window_size": 56,
        **seeing,
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(
        text_config={"rope_parameters": rope, **_ends(tokenizer), **shape}, vision_config=vision,
        **_qwen_tokens(ids), tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(config), tokenizer


def _qwen2_5_vl_processor(tokenizer: Any) -> Any:
    import transformers as hf

    images = _qwen_images(hf, patch_size=14)
    return hf.Qwen2_5_VLProcessor(images, tokenizer, hf.Qwen2VLVideoProcessor(), tokenizer.chat_template)


def _qwen3_vl(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Like `_qwen2_5_vl`, with the tower's features added in the language model's first layers."""
    import transformers as hf

    tokenizer, seeing = _tokenizer(QWEN, "<|vision_start|><|image_pad|><|vision_end|>"), shape.pop("vision", {})
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
        "out_hidden_size": shape["hidden_size"], "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
        **seeing,
    }  # fmt: skip
    config = hf.Qwen3VLConfig(
        text_config={"head_dim": 32, "rope_parameters": rope, **_ends(tokenizer), **shape}, vision_config=vision,
        **_qwen_tokens(ids), tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Qwen3VLForConditionalGeneration(config), tokenizer


def _qwen3_vl_processor(tokenizer: Any) -> Any:
    import transformers as hf

    images = _qwen_images(hf, patch_size=16)
    return hf.Qwen3VLProcessor(images, tokenizer, hf.Qwen3VLVideoProcessor(), tokenizer.chat_template)


def _qwen3_5(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Like `_qwen2_5_vl`, with recurrent language-model layers."""
    import transformers as hf

    tokenizer, seeing = _tokenizer(QWEN, "<|vision_start|><|image_pad|><|vision_end|>"), shape.pop("vision", {})
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
    text = {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "rope_parameters": rope | {"partial_rotary_factor": 1.0}, **_ends(tokenizer), **shape,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
        "out_hidden_size": shape["hidden_size"], "num_position_embeddings": 64, **seeing,
    }  # fmt: skip
    config = hf.Qwen3_5Config(
        text_config=text, vision_config=vision, **_qwen_tokens(tokenizer.convert_tokens_to_ids),
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Qwen3_5ForConditionalGeneration(config), tokenizer


def _qwen_tokens(ids: Any) -> dict[str, int]:
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


def _qwen_images(hf: Any, patch_size: int) -> Any:
    least, most = (2 * patch_size) ** 2, (6 * patch_size) ** 2
    return hf.Qwen2VLImageProcessor(
        patch_size=patch_size, merge_size=2, size={"shortest_edge": least, "longest_edge": most}
    )


def _mistral3(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images with a token for each 16 x 16 pixels, and a token behind each row."""
    import transformers as hf

    tokenizer, seeing = _tokenizer(MISTRAL3, MISTRAL3[0]), shape.pop("vision", {})
    text = {"model_type": "ministral3", "head_dim": 32, "rms_norm_eps": 1e-5, **_ends(tokenizer), **shape}
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "head_dim": 16, "image_size": 2 * SIDE, "patch_size": 8, **seeing,
    }  # fmt: skip
    config = hf.Mistral3Config(
        text_config=text, vision_config=vision, spatial_merge_size=2, vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids(MISTRAL3[0]), tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Mistral3ForConditionalGeneration(config), tokenizer


def _mistral3_processor(tokenizer: Any) -> Any:
    import transformers as hf

    images = hf.PixtralImageProcessor(size={"longest_edge": 2 * SIDE}, patch_size=8)
    return hf.PixtralProcessor(
        images, tokenizer, patch_size=8, spatial_merge_size=2, chat_template=tokenizer.chat_template
    )


def _internvl(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images with 4 tokens for each tile, between two other tokens."""
    import transformers as hf

    tokenizer, seeing = _tokenizer(INTERNVL, INTERNVL[2]), shape.pop("vision", {})
    names = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    tokenizer._set_model_specific_special_tokens(dict(zip(names, INTERNVL, strict=True)))
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [SIDE, SIDE], "patch_size": [8, 8], **seeing,
    }  # fmt: skip
    config = hf.InternVLConfig(
        text_config={"model_type": "qwen2", **_ends(tokenizer), **shape}, vision_config=vision, image_seq_length=4,
        image_token_id=tokenizer.convert_tokens_to_ids(INTERNVL[2]), tie_word_embeddings=False,
    )  # fmt: skip
    return hf.InternVLForConditionalGeneration(config), tokenizer


def _internvl_processor(tokenizer: Any) -> Any:
    import transformers as hf

    images = hf.GotOcr2ImageProcessor(size={"height": SIDE, "width": SIDE}, max_patches=2)
    return hf.InternVLProcessor(
        images, tokenizer, hf.InternVLVideoProcessor(), image_seq_length=4, chat_template=tokenizer.chat_template
    )


def _gemma3(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images of 4 tokens, which attend bidirectionally."""
    import transformers as hf

    named = {"boi_token": GEMMA3[0], "eoi_token": GEMMA3[1], "image_token": GEMMA3[2]}
    tokenizer, seeing = _tokenizer(GEMMA3, GEMMA3[0]), shape.pop("vision", {})
    tokenizer._set_model_specific_special_tokens(named)
    tokenizer.add_tokens(["\n" * n for n in (1, 2, 3, 4)])  # vLLM asks for them by these names
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], **_ends(tokenizer), **shape,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 8, "vision_use_head": False, **seeing,
    }  # fmt: skip
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=ids(GEMMA3[0]),
        eoi_token_index=ids(GEMMA3[1]), image_token_index=ids(GEMMA3[2]), tie_word_embeddings=True,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config), tokenizer


def gemma3_processor(tokenizer: Any) -> Any:
    """Gemma 3's processor without torchvision."""
    import transformers as hf
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return hf.Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)


def _gemma4(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Images of up to 70 tokens, per-layer embeddings, shared keys and values, a clipped tower, and an audio tower."""
    text = {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [*WINDOWS, *WINDOWS],
        "hidden_size_per_layer_input": 16, "use_double_wide_mlp": True,
    }  # fmt: skip
    audio = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 32,
    }  # fmt: skip
    return _with_soft_tokens(shape, text, {"use_clipped_linears": True}, audio)


def _gemma4_both_ways(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Like `_gemma4`, with bidirectional image tokens in layers with a window. The others use keys as values."""
    text = {
        "layer_types": [*WINDOWS], "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    }  # fmt: skip
    return _with_soft_tokens(shape, text, {"standardize": True}, None)


def _gemma4_experts(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Like `_gemma4_both_ways`, with experts next to each layer's MLP."""
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return _gemma4_both_ways({**shape, **experts})


def _with_soft_tokens(
    shape: dict[str, Any], text: dict[str, Any], vision: dict[str, Any], audio: Any
) -> tuple[Any, Any]:
    import transformers as hf

    tokenizer, seeing = _tokenizer((*GEMMA4.values(), "<|video|>"), GEMMA4["image"]), shape.pop("vision", {})
    tokenizer._set_model_specific_special_tokens({f"{name}_token": token for name, token in GEMMA4.items()})
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA4.items()}
    own = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 96, "final_logit_softcapping": 30.0}
    own |= {**_ends(tokenizer), "pad_token_id": 0, "vocab_size_per_layer_input": len(tokenizer)}  # vLLM's, see PLE
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
        "position_embedding_size": 256, "default_output_length": 70, **vision, **seeing,
    }  # fmt: skip
    config = hf.Gemma4Config(
        text_config={**own, **shape, **text, "max_position_embeddings": 512}, vision_config=vision, audio_config=audio,
        boi_token_id=ids["boi"], eoi_token_id=ids["eoi"], image_token_id=ids["image"], boa_token_id=ids["boa"],
        eoa_token_index=ids["eoa"], audio_token_id=ids["audio"],
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
    )  # fmt: skip
    return hf.Gemma4ForConditionalGeneration(config), tokenizer


def _gemma4_processor(tokenizer: Any) -> Any:
    import transformers as hf

    images = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    seeing, watching = hf.Gemma4ImageProcessor(**images), hf.Gemma4VideoProcessor(**images)
    return hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(), seeing, tokenizer, watching, tokenizer.chat_template, image_seq_length=70
    )


FAMILIES = {
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5_vl": _qwen3_5,
    "mistral3_vl": _mistral3,
    "internvl_vl": _internvl,
    "gemma3_vl": _gemma3,
    "gemma4_vl": _gemma4,
    "gemma4_both_ways": _gemma4_both_ways,
    "gemma4_experts": _gemma4_experts,
}
PROCESSORS = {
    "idefics3": _idefics3_processor,
    "smolvlm": _smolvlm_processor,
    "qwen2_5_vl": _qwen2_5_vl_processor,
    "qwen3_vl": _qwen3_vl_processor,
    "qwen3_5_vl": _qwen3_vl_processor,
    "mistral3_vl": _mistral3_processor,
    "internvl_vl": _internvl_processor,
    "gemma3_vl": gemma3_processor,
    **dict.fromkeys(("gemma4_vl", "gemma4_both_ways", "gemma4_experts"), _gemma4_processor),
}


def made_up(model: Any, family: str, pictures: int = 1, seed: int = 0) -> ModelInput:
    """Make a prompt with images of noise, as a processor would."""
    draw = torch.Generator().manual_seed(seed)
    token, per_picture = model.config.image_token_id, 2 if family.startswith("qwen") else 4
    ids, places, engine_ids = [11 + seed], [], [11 + seed]
    for _ in range(pictures):
        places += range(len(ids), len(ids) + per_picture)
        ids += [token] * per_picture + [70 + seed]
        engine_ids += [token, 70 + seed]
    kinds = torch.zeros(1, len(ids), dtype=torch.long)
    kinds[0, places] = 1
    inputs: dict[str, torch.Tensor]
    if family.startswith("qwen"):
        patch = model.config.vision_config.patch_size
        inputs = {
            "pixel_values": torch.randn(8 * pictures, 6 * patch**2, generator=draw),
            "image_grid_thw": torch.tensor([[1, 2, 4]] * pictures),
            "mm_token_type_ids": kinds,
        }
    elif family == "mistral3_vl":
        inputs = {
            "pixel_values": torch.randn(pictures, 3, SIDE, SIDE, generator=draw),
            "image_sizes": torch.tensor([[SIDE, SIDE]] * pictures),
        }
    elif family == "internvl_vl":
        inputs = {"pixel_values": torch.randn(pictures, 3, SIDE, SIDE, generator=draw)}
    elif family.startswith("gemma4"):
        vision = model.config.vision_config
        side = 2 * vision.pooling_kernel_size  # patches
        grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).view(1, -1, 2)
        patches = torch.nn.functional.pad(grid, (0, 0, 0, side**2), value=-1)  # half of the patches are padding
        pixels = torch.rand(pictures, side**2, 3 * vision.patch_size**2, generator=draw)
        inputs = {
            "pixel_values": torch.nn.functional.pad(pixels, (0, 0, 0, side**2)),
            "image_position_ids": patches.expand(pictures, -1, -1),
            "mm_token_type_ids": kinds,
        }
    elif family == "gemma3_vl":
        inputs = {"pixel_values": torch.randn(pictures, 3, SIDE, SIDE, generator=draw), "token_type_ids": kinds}
    else:
        inputs = {
            "pixel_values": torch.randn(1, pictures, 3, SIDE, SIDE, generator=draw),
            "pixel_attention_mask": torch.ones(1, pictures, SIDE, SIDE, dtype=torch.long),
        }
    return ModelInput(tuple(ids), Images(f"{seed}-{pictures}", tuple(engine_ids), (), inputs, tuple(places)))


def picture(number: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """Make an image with a colour gradient that depends on ``number``."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    planes = [(x * 5 + number * 40) % 256, (y * 5 + number * 90) % 256, torch.full_like(x, (number * 50) % 256)]
    return Image.fromarray(torch.stack(planes, -1).to(torch.uint8).numpy())


def prompts(size: int = 8, images: int = 1) -> Dataset:
    """Make conversations with ``images`` images each, of different sizes."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{'see ' * (i % 3)}{i}"}],
            "images": [picture(i + 10 * k, SIDE + 32 * (i % 2), SIDE + 32 * (k % 2)) for k in range(images)],
            "answer": chr(97 + i % 26),
        }
        for i in range(size)
    ]
    return Dataset.from_list(rows)
