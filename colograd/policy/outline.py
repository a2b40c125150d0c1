"""Outlines: models on the meta device, made from a configuration, with parameters that have shapes but no values."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ..config import GRPOConfig
from ..runtime import registry
from ..runtime.hub import check_model_name
from .lora import adapter_folder, wrap
from .towers import has_tower

LARGE = 1.0  # Billions of parameters from which `note_on_cpu` warns. A CPU trains them at a few tokens per second.


def outline(path: str, dtype: torch.dtype, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Make the model at ``path`` (a folder or a Hub id) on the meta device, without values, from its config.json."""
    check_model_name(path, revision=revision)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
        kind = AutoModelForImageTextToText if has_tower(config) else AutoModelForCausalLM
        with torch.device("meta"):
            return kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path!r} has no configuration of a causal language model ({reason}) Give a folder with a config.json, or "
            "a Hub id."
        ) from None


def note_on_cpu(model: Any, config: GRPOConfig) -> str:
    """Return a warning if torch has no accelerator and the user named a model of at least 10^9 parameters, else "".
    Models passed as objects, and models whose configuration can't be read, get no warning."""
    if torch.accelerator.is_available() or not isinstance(model, str | os.PathLike):
        return ""
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    path = str((adapter_folder(str(model)) or {}).get("base_model_name_or_path") or model)
    trust = given.get("trust_remote_code", config.trust_remote_code)
    try:
        found = outline(path, torch.bfloat16, trust, given.get("revision"))
    except Exception:  # Code from a model's folder may raise any exception. Loading the model will report the error.
        return ""
    billions = sum(parameter.numel() for parameter in found.parameters()) / 1e9
    if billions < LARGE:
        return ""
    dtype = "its own precision" if config.policy_dtype == "auto" else config.policy_dtype
    return (
        f"no GPU was found: {os.path.basename(path.rstrip('/'))}, of {billions:.1f} billion parameters, is trained on "
        f"the CPU in {dtype}, which is meant for small models; `colograd plan` says which GPUs it would fit"
    )


def with_adapter(model: Any, peft_config: Any) -> Any:
    """Add the LoRA adapter of a `peft.LoraConfig` to a model on the meta device."""
    with torch.device("meta"), warnings.catch_warnings():
        # peft adds rank patterns for fused experts, then warns that these patterns match no linear layer.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match")
        return wrap(model, peft_config, seed=0)


def to_pack(model: Any, settings: Mapping[str, Any]) -> dict[torch.Tensor, int]:
    """Return the weights of an `outline` that loading with the quantisation ``settings`` would quantise, each with its
    number of bytes after quantisation. Return an empty dict without settings. Extension `quantized` does this."""
    return registry.hooks("to_pack")[0](model, settings) if settings else {}
