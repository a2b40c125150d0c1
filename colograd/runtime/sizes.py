"""Sizes from a transformers model configuration, and sizes of thumbnails."""

from __future__ import annotations

from typing import Any

THUMBNAILS = 4  # Maximum number of recorded thumbnails (small images) per prompt.
THUMBNAIL_BYTES = 4096


def size_of(model_config: Any, *names: str) -> int:
    """Return the largest value that attributes ``names`` of a transformers configuration have in any layer, or 0."""
    config, found = model_config.get_text_config(), [0]
    for name in names:
        try:
            values = getattr(config, name, None)
        except RuntimeError:  # transformers raises this if layers may have different values of the attribute.
            values = [getattr(layer, name, None) for layer in config.per_layer_config]
        found += [int(value or 0) for value in (values if isinstance(values, list | tuple) else [values])]
    return max(found)


def num_experts(model_config: Any) -> int:
    found = size_of(model_config, "num_experts", "num_local_experts", "n_routed_experts")
    return found if experts_per_token(model_config) or found > 1 else 0


def experts_per_token(model_config: Any) -> int:
    return size_of(model_config, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


def active_parameters(model: Any) -> int:
    """Return the number of parameters that compute one token. In a mixture of experts only the chosen experts count."""
    total, experts = int(model.num_parameters()), num_experts(model.config)
    if not experts:
        return total
    idle = 1 - (experts_per_token(model.config) or experts) / experts
    return total - int(idle * sum(p.numel() for name, p in model.named_parameters() if ".experts." in name))
