"""Names that TRL's scripts import in addition to the trainer and its configuration."""

from __future__ import annotations

import os
from typing import Any

NAMES = (
    "ModelConfig", "ScriptArguments", "TrlParser", "get_kbit_device_map", "get_peft_config", "get_quantization_config",
)  # fmt: skip


def get_kbit_device_map() -> dict[str, int]:
    """Return a device map for the whole model on this process's GPU. Not in every version of TRL."""
    return {"": int(os.environ.get("LOCAL_RANK", "0"))}


def find(name: str) -> Any:
    """Return the object of this name. Raises ImportError if TRL isn't installed."""
    if name == "get_kbit_device_map":
        return get_kbit_device_map
    import trl

    return getattr(trl, name)
