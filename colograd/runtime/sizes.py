"""Sizes in a model's configuration, whose layers may differ."""

from __future__ import annotations

from typing import Any


def size_of(model_config: Any, *names: str) -> int:
    """The largest of the sizes that a configuration of transformers has by these names, in any layer; 0 without one."""
    config, found = model_config.get_text_config(), list[Any]()
    for name in names:
        try:
            values = getattr(config, name, None)
        except RuntimeError:  # transformers' own of a model whose layers differ
            values = [getattr(layer, name, None) for layer in config.per_layer_config]
        found += values if isinstance(values, list | tuple) else [values]
    return max((int(value) for value in found if value), default=0)
