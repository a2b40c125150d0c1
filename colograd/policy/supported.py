"""Reject unsupported mixtures of experts, quantised bases and vision-language models, from the configuration alone.

The checks run before weights are read.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoConfig

from ..config import GRPOConfig
from ..extensions.experts.router_replay import SHARES
from ..extensions.hybrids.recurrent import mixers_of
from ..extensions.images import towers as images
from ..extensions.quantized.checkpoints import asked_for, check_quantized, saved_in
from ..extensions.sequence_parallel.recurrent_heads import can_share_out
from ..runtime.hub import check_model_name
from ..runtime.sizes import num_experts
from .lora import adapter_folder, is_adapted, unwrap

# Mixtures of experts that tests train, see docs/models.md. Others are proved when a run starts.
TRIED = ("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
WHOLE = ("gpt_oss", "olmoe")  # mixtures that need a whole engine on each rank
# Models that support a policy in the engine's tensor-parallel layout.
CUT = ("gemma3_text", "lfm2", "llama", "qwen2", "qwen3", "qwen3_moe")


def check_supported(model: Any, config: GRPOConfig, peft_config: Any = None, has_images: bool = False) -> None:
    """Check that a model can be trained with the run's settings.

    Args:
        model: name or model object.
        peft_config: configuration of the new adapter; None: no new adapter.
        has_images: whether the run has images, see `images.TEXT_FIRST`.

    Raises:
        ValueError: the model can't be trained, or not with these settings.
    """
    by_name, model_config = isinstance(model, str | os.PathLike), _configuration(model, config)
    has_adapter = peft_config is not None or (adapter_folder(str(model)) is not None if by_name else is_adapted(model))
    check_quantized(model_config, config, str(model) if by_name else None, has_adapter)
    if model_config is None:
        return
    if config.tensor_parallel:
        quantized = saved_in(model_config) or (asked_for(config, str(model)) if by_name else None)
        _check_cut(model_config, config, quantized is not None)
    if (seen := getattr(model_config.get_text_config(), "use_bidirectional_attention", None)) in (True, "all"):
        raise ValueError(
            f"{model_config.model_type} has use_bidirectional_attention {seen!r}: its tokens see later ones, and can't "
            "be sampled one after the other. Choose another model."
        )
    if images.takes_images(model_config) and (has_images or model_config.model_type not in images.TEXT_FIRST):
        _check_images(model_config, config)
    if num_experts(model_config):
        _check_experts(model_config, config)
    elif config.router_replay:
        raise ValueError(
            f"router_replay is true, but {model_config.get_text_config().model_type} is no mixture of experts: "
            "set it to false."
        )


def check_planned(model_config: Any, ranks: int) -> None:
    """Run the checks of `check_supported` that a memory plan needs; ``ranks`` share an engine."""
    if num_experts(model_config):
        _check_experts_split(model_config, ranks)


def can_be_cut(model_config: Any) -> bool:
    """Return whether a policy of this configuration can lie in the engine's tensor-parallel layout."""
    return model_config.model_type in CUT


def check_shared_rows(model: Any, size: int, why_padded: str) -> None:
    """Raise a ValueError if ``size`` ranks share out the tokens of rows, but the model's rows can't be cut."""
    if size > 1 and (reason := why_rows_stay_whole(model, why_padded)):
        raise ValueError(
            f"sequence_parallel_size is {size}, but {reason}, which ranks can't share out in this version: set it to 1."
        )


def why_rows_stay_whole(model: Any, why_padded: str) -> str:
    """Return why ranks can't share out a row's tokens, from the model's modules and configuration; empty: they can."""
    inner = unwrap(model)
    name = type(inner).__name__
    mixers = sorted({type(mixer).__name__ for mixer in mixers_of(inner) if not can_share_out(mixer)})
    found = {
        f"rows of {name} are padded ({why_padded})": bool(why_padded),
        f"{name} has layers of {', '.join(mixers)}, whose state goes from token to token": bool(mixers),
        f"{name} reads images": images.takes_images(inner.config) and not images.reads_text_alone(inner),
        f"{name} chooses its rotary frequencies by the row's last position": _rotates_by_length(inner.config),
    }
    return next((reason for reason, holds in found.items() if holds), "")


def _rotates_by_length(model_config: Any) -> bool:
    """Return whether rotary frequencies depend on the largest position in a forward."""
    text = model_config.get_text_config()
    given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    ways = [given, *(of_layers for of_layers in given.values() if isinstance(of_layers, dict))]
    kinds = [str(way.get("rope_type") or "") for way in ways]
    return text.model_type == "phimoe" or any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def _check_cut(model_config: Any, config: GRPOConfig, is_quantized: bool) -> None:
    remedy = "set sharding: gradients, or fsdp for a policy that no rank has room for"
    if not can_be_cut(model_config):
        raise ValueError(
            f"sharding is {config.sharding!r}, but {model_config.model_type} isn't among the models whose policy can "
            f"lie in the engine's layout in this version ({', '.join(CUT)}): {remedy}."
        )
    if is_quantized:
        raise ValueError(
            f"sharding is {config.sharding!r}, but the base is quantised, and its parts aren't packed as the engine's "
            "ranks would have them in this version: set sharding: gradients, or take the model as it is."
        )
    dropout = {name: value for name, value in vars(model_config).items() if "dropout" in name and value}
    if dropout and not config.disable_dropout:
        name, value = dropout.popitem()
        raise ValueError(
            f"sharding is {config.sharding!r} and the model has {name} {value}, but the ranks of an engine would drop "
            "different parts of one row: set disable_dropout: true."
        )


def _check_experts(model_config: Any, config: GRPOConfig) -> None:
    kind = model_config.get_text_config().model_type
    _check_experts_split(model_config, config.vllm_tensor_parallel_size)
    if config.router_replay and kind not in SHARES:
        raise ValueError(
            f"router_replay is true, but how {kind}'s router shares a token out among experts isn't known: set it to "
            f"false, or choose one of {', '.join(SHARES)}."
        )
    noise = float(getattr(model_config.get_text_config(), "router_jitter_noise", None) or 0.0)
    if noise:
        raise ValueError(
            f"{kind} has router_jitter_noise {noise:g}: its training forward would send tokens to other experts than "
            "the sampler did. Set model_init_kwargs: {router_jitter_noise: 0.0}."
        )


def _check_experts_split(model_config: Any, ranks: int) -> None:
    text = model_config.get_text_config()
    kind = text.model_type
    if ranks > 1 and (kind in WHOLE or kind not in TRIED):
        raise ValueError(
            f"vllm_tensor_parallel_size is {ranks}, but the engine of {kind}, a mixture of experts, can't be split "
            "over ranks in this version: set it to 1 (each rank has a whole engine)."
        )
    size = int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
    if size % ranks:
        raise ValueError(
            f"vllm_tensor_parallel_size is {ranks}, but must divide the size of {kind}'s experts, which is {size}: "
            "choose another."
        )


def _check_images(model_config: Any, config: GRPOConfig) -> None:
    kind, text = model_config.model_type, model_config.get_text_config()
    name = "mm_tokens_per_image" if hasattr(model_config, "mm_tokens_per_image") else "default_output_length"
    tokens = getattr(model_config, name, 0) or getattr(model_config.vision_config, name, 0)
    window = getattr(text, "sliding_window", None)
    if images.see_both_ways(model_config) and window and tokens > window:
        raise ValueError(
            f"{kind} has {name} {tokens}, which must be at most its sliding_window, {window}: the tokens "
            "of a larger image don't see each other in vLLM. Choose a model with smaller images or a larger window."
        )
    given: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    part = int(given.get("long_prefill_token_threshold") or 0)
    if images.see_both_ways(model_config) and 0 < part < tokens:
        raise ValueError(
            f"vllm_engine_kwargs has long_prefill_token_threshold {part}, but {kind} has {name} {tokens}, "
            "which the engine must read in one step: raise it, or remove it."
        )
    if getattr(text, "hidden_size_per_layer_input", None) and text.pad_token_id != 0:
        raise ValueError(
            f"{kind} has pad_token_id {text.pad_token_id}, whose embeddings of each layer an image's tokens have, but "
            "vLLM gives them those of token 0: set it to 0, as published, or choose another model."
        )
    settings = {
        "torch_compile": config.torch_compile,
        "use_liger_kernel": config.use_liger_kernel,
        "vllm_engine_kwargs: {mm_processor_kwargs}": "mm_processor_kwargs" in given,
    }
    if asked := [name for name, is_set in settings.items() if is_set]:
        raise ValueError(f"{asked[0]} isn't available for vision-language models in this version ({kind}): remove it.")


def _configuration(model: Any, config: GRPOConfig) -> Any:
    """Return the configuration of the model or of an adapter's base.

    None: it can't be read, and loading the model will raise the error.
    """
    if not isinstance(model, str | os.PathLike):
        return getattr(unwrap(model), "config", None)
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    path = str((adapter_folder(str(model)) or {}).get("base_model_name_or_path") or model)
    trust = given.get("trust_remote_code", config.trust_remote_code)
    check_model_name(path, revision=given.get("revision"))
    try:
        found = AutoConfig.from_pretrained(path, revision=given.get("revision"), trust_remote_code=trust)
    except (OSError, ValueError):
        return None
    if "router_jitter_noise" in given:
        found.router_jitter_noise = given["router_jitter_noise"]
    return found
