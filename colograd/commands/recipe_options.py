"""What a recipe says of the options of `colograd plan`. Nothing of it depends on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def read(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What a command line of `colograd train` amounts to.

    Returns:
        The options that it says something of, as the command's parser names them; and by option a line on what is
        assumed where it says too little.

    Raises:
        ValueError: no such recipe, or keys or flags that aren't a run's.
    """
    from ..config.parse import planned_settings

    given = planned_settings(argv)
    notes: dict[str, str] = {}
    dtype = _dtype(given, notes)
    quantised = given["load_in_4bit"] or given["load_in_8bit"]
    budget = given["max_tokens_per_microbatch"]
    found = {
        "model": given["model_name_or_path"],
        "tensor_parallel": given["vllm_tensor_parallel_size"],
        "context": _context(given, notes),
        "completion": given["max_completion_length"],
        "group": given["num_generations"],
        **_sequences(given),
        "max_tokens": 0 if budget in (None, "auto") else int(budget),
        "lora_rank": _rank(given, notes),
        "bits": (4 if given["load_in_4bit"] else 8) if quantised else None,
        "nested": given["use_bnb_nested_quant"],
        "served": bool(quantised) and given["weights"] == "shared",
        "dtype": dtype,
        "optim": _optimizer(given, dtype),
        "reference": given["beta"] > 0 and not given["offload_reference"],
        "sleep": given["vllm_enable_sleep_mode"],
        "offload_optimizer": given["offload_optimizer"],
        "no_checkpointing": given["gradient_checkpointing"] is False,
        "trust_remote_code": given["trust_remote_code"],
        "weights": given["weights"],
    }
    return {name: value for name, value in found.items() if value is not None}, notes


def _dtype(given: dict[str, Any], notes: dict[str, str]) -> str:
    """Of the policy, as loading it takes it (`ModelConfig.dtype`)."""
    kwargs = given["model_init_kwargs"]
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    named = kwargs.get("dtype") or kwargs.get("torch_dtype") or given["dtype"]
    if named is None:
        return "bfloat16" if given["optim"] in ("auto", "adamw_split") else "float32"
    if named == "auto":
        notes["dtype"] = "dtype: auto is planned as bfloat16 (--dtype float32: as that)"
        return "bfloat16"
    return str(named).removeprefix("torch.")


def _optimizer(given: dict[str, Any], dtype: str) -> str:
    if given["optim"] != "auto":
        return str(given["optim"])
    return "adamw_split" if dtype == "bfloat16" else "adamw_torch"


def _rank(given: dict[str, Any], notes: dict[str, str]) -> int:
    """Of the adapter; 0: there is none."""
    if not given["use_peft"]:
        return 0
    if given["lora_target_modules"] != ["all-linear"]:
        notes["lora_rank"] = "the adapter is planned on all linear layers, whichever the recipe names"
    return int(given["lora_r"])


def _context(given: dict[str, Any], notes: dict[str, str]) -> int | None:
    """Tokens of the longest sequence; None: it says nothing. A dataset's longest prompt isn't known without reading it,
    and is taken for as long as a completion."""
    if given["vllm_max_model_length"]:
        return int(given["vllm_max_model_length"])
    completion = max(given["max_completion_length"] or 0, given["max_completion_length_eval"] or 0)
    prompt = completion if given["max_prompt_tokens"] is None else int(given["max_prompt_tokens"])
    if given["max_prompt_tokens"] is None and completion:
        notes["context"] = f"prompts are planned with up to {prompt:,} tokens, as no limit is given (--context)"
    return prompt + completion or None


def _sequences(given: dict[str, Any]) -> dict[str, int]:
    """Completions of a generation: over all GPUs, or of each engine, whichever the recipe says.

    Whole steps are sampled together, so that a part of one is all of it (`StepKnobs`).
    """
    group, accumulated = given["num_generations"], given["gradient_accumulation_steps"]
    together = given["steps_per_generation"] or 1
    if given["prompts_per_step"] is not None:
        step = given["prompts_per_step"] * group
        return {"sequences": max(step * together, given["generation_batch_size"] or 0)}
    batch = given["per_device_train_batch_size"]
    if (given["generation_batch_size"] or 0) > batch * accumulated:
        return {"sequences": given["generation_batch_size"]}
    return {"sequences_per_engine": batch * max(accumulated, together)}
