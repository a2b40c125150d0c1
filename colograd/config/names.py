"""Unknown names: one error that gives the name, the nearest known one, or why TRL's field of that name isn't taken."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

# TRL 1.16 fields that this version refuses, each with the reason and what to use instead.
REFUSED: dict[str, str] = {
    "router_aux_loss_coef": "mixture-of-experts auxiliary losses aren't computed yet; remove it",
    "cast_lm_head_to_fp32": "log-probabilities are always computed in float32; remove it",
    "ds3_gather_for_generation": "ZeRO-3 isn't published to the engine yet; remove it",
    "pad_to_multiple_of": "rows are packed and never padded; remove it",
    "cache_implementation": "generation always runs in vLLM; remove it",
    "vllm_model_impl": "pass vllm_engine_kwargs: {model_impl: ...} instead",
    "vllm_server_base_url": "there is no server: every rank has its own engine; remove it",
    "vllm_server_host": "there is no server: every rank has its own engine; remove it",
    "vllm_server_port": "there is no server: every rank has its own engine; remove it",
    "vllm_server_timeout": "there is no server: every rank has its own engine; remove it",
    "vllm_group_port": "there is no server: every rank has its own engine; remove it",
    "multi_objective_aggregation": "rewards are summed, then normalised, in this version",
    "sync_ref_model": "there is no reference model in this version (beta must be 0)",
    "ref_model_mixup_alpha": "there is no reference model in this version (beta must be 0)",
    "ref_model_sync_steps": "there is no reference model in this version (beta must be 0)",
    "max_tool_calling_iterations": "tools aren't available in this version",
    "log_multimodal": "text models only in this version",
    "log_completions_hub_repo": "completions are logged locally in this version",
    "use_transformers_continuous_batching": "generation always runs in vLLM; remove it",
    "transformers_continuous_batching_config": "generation always runs in vLLM; remove it",
    "use_transformers_paged": "generation always runs in vLLM; remove it",
    "vllm_importance_sampling_cap": "renamed: use vllm_importance_sampling_clip_max",
    "dataset_streaming": "streamed datasets aren't available in this version: the order of prompts needs a length",
    "bnb_4bit_quant_type": "4-bit bases aren't available in this version",
    "bnb_4bit_quant_storage": "4-bit bases aren't available in this version",
    "use_bnb_nested_quant": "4-bit bases aren't available in this version",
    "ignore_bias_buffers": "gradients aren't synchronised by DDP; remove it",
    "max_prompt_length": "removed by TRL too: see max_prompt_tokens and overlong_prompts",
}


def unknown_name(name: str, known: Iterable[str]) -> str:
    """The message for a key that no group has: value, rule, remedy."""
    if name in REFUSED:
        return f"`{name}` isn't supported: {REFUSED[name]}."
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f" Did you mean `{near[0]}`?" if near else " docs/configuration.md lists every key."
    return f"Unknown configuration key `{name}`.{hint}"


T = TypeVar("T")


def names_checked(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass: an unknown keyword is answered by `unknown_name`.

    Raises:
        ValueError: at construction, instead of the dataclass's bare TypeError.
    """
    plain_init = cls.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                raise ValueError(unknown_name(name, known))
        plain_init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
