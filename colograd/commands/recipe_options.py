"""A recipe's settings as the defaults of `colograd plan`. None depends on the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ..config.parse import planned_settings
from ..config.policy import default_dtype, resolve_optimizer


def recipe_options(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the recipe and the flags of a `colograd train` command line.

    Returns:
        The options of `colograd plan`; a line on each option that is assumed, as it depends on the model or the data.

    Raises:
        ValueError: no such recipe, or unknown keys or flags.
    """
    settings, assumed = planned_settings(argv), {}
    for name in ("model_init_kwargs", "vllm_engine_kwargs"):
        settings[name] = _mapping(settings[name])
    loading = settings["model_init_kwargs"]
    dtype = loading.get("dtype") or loading.get("torch_dtype") or settings["dtype"] or default_dtype(settings["optim"])
    if dtype == "auto":
        dtype = "bfloat16"
        assumed["dtype"] = "dtype: auto is planned as bfloat16 (--dtype float32: as that)"
    if settings["use_peft"] and settings["lora_target_modules"] != ["all-linear"]:
        assumed["lora_r"] = "the adapter is planned on all linear layers, whichever the recipe names"
    completion = max(settings["max_completion_length"] or 0, settings["max_completion_length_eval"] or 0)
    prompt = settings["max_prompt_tokens"]
    if prompt is None:  # the data aren't read
        prompt = completion
        line = f"prompts are planned with up to {prompt:,} tokens, as no limit is given (--context)"
        if completion and not settings["vllm_max_model_length"]:
            assumed["vllm_max_model_length"] = line
    dtype = str(dtype).removeprefix("torch.")
    options = settings | {
        "dtype": dtype,
        "optim": resolve_optimizer(settings["optim"], getattr(torch, dtype, None)),
        "lora_r": settings["lora_r"] if settings["use_peft"] else 0,
        "bits": 4 if settings["load_in_4bit"] else 8 if settings["load_in_8bit"] else None,
        "vllm_max_model_length": settings["vllm_max_model_length"] or prompt + completion or None,
        "max_tokens_per_microbatch": _tokens(settings["max_tokens_per_microbatch"]),
        **_sequences(settings),
    }
    return {name: value for name, value in options.items() if value is not None}, assumed


def _mapping(value: Any) -> dict[str, Any]:
    """A mapping, which a command line writes as JSON."""
    return dict(json.loads(value) if isinstance(value, str) else value or {})


def _tokens(budget: Any) -> int:
    return 0 if budget in (None, "auto") else int(budget)


def _sequences(settings: dict[str, Any]) -> dict[str, int]:
    """Completions of a generation, over all GPUs or of each engine. Whole steps are sampled together (`StepKnobs`)."""
    accumulated, together = settings["gradient_accumulation_steps"], settings["steps_per_generation"] or 1
    batch, generation = settings["per_device_train_batch_size"], settings["generation_batch_size"] or 0
    if settings["prompts_per_step"] is not None:
        step = settings["prompts_per_step"] * settings["num_generations"]
        return {"sequences": max(step * together, generation)}
    if generation > batch * accumulated:
        return {"sequences": generation}
    return {"sequences_per_engine": batch * max(accumulated, together)}
