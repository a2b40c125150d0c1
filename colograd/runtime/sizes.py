"""Sizes in a model's configuration. Its layers may differ."""

from __future__ import annotations

from typing import Any


def size_of(model_config: Any, *names: str) -> int:
    """Return the largest size that a transformers configuration has by these names, in any layer; 0 without one."""
    config, found = model_config.get_text_config(), list[Any]()
    for name in names:
        try:
            values = getattr(config, name, None)
        except RuntimeError:  # transformers raises it for a model with differing layers
            values = [getattr(layer, name, None) for layer in config.per_layer_config]
        found += values if isinstance(values, list | tuple) else [values]
    return max((int(value) for value in found if value), default=0)
