"""Policies from the folder of an adapter."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedModel

from ...config import GRPOConfig
from ...policy.loading import from_name


def from_adapter(
    folder: str, saved: dict[str, Any], config: GRPOConfig, peft_config: Any, has_images: bool
) -> tuple[PreTrainedModel, str, str]:
    """Load the model and trainable adapter of a folder with an adapter_config.json.

    Returns:
        The model, the base's path and the tokenizer's path.
    """
    if peft_config is not None:
        raise ValueError(
            f"{folder!r} holds an adapter and a new one is asked for too (use_peft, peft_config), but one is trained: "
            "remove use_peft to go on with the saved one, or give model_name_or_path the base model."
        )
    base = str(saved.get("base_model_name_or_path") or "")
    if not base:
        raise ValueError(
            f"{folder!r} holds an adapter that doesn't name its base: set base_model_name_or_path in its "
            "adapter_config.json."
        )
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"{folder!r} holds an adapter, but peft can't be imported ({error}): pip install peft."
        ) from None
    try:
        loaded = from_name(base, config, adapter=folder, has_images=has_images)
    except ValueError as error:
        raise ValueError(f"{folder!r} holds an adapter whose base can't be loaded: {error}") from None
    model = peft.PeftModel.from_pretrained(loaded, folder, is_trainable=True)
    has_tokenizer = os.path.isfile(os.path.join(folder, "tokenizer_config.json"))
    return model, base, folder if has_tokenizer else base
