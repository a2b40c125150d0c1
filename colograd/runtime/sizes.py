"""Sizes in a model's configuration. Its layers may differ."""

from __future__ import annotations

from typing import Any

THUMBNAILS = 4  # largest number of thumbnails of a prompt
THUMBNAIL_BYTES = 4096  # largest bytes of a thumbnail


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


def num_experts(model_config: Any) -> int:
    """Return the number of a layer's experts that routers choose from; 0: no mixture of experts."""
    found = size_of(model_config, "num_experts", "num_local_experts", "n_routed_experts")
    return found if experts_per_token(model_config) or found > 1 else 0


def experts_per_token(model_config: Any) -> int:
    """Return the number of experts per token; 0: not in the configuration."""
    return size_of(model_config, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


def active_parameters(model: Any) -> int:
    """Return the number of parameters that a token uses: of a mixture's experts only the chosen ones count."""
    total, experts = int(model.num_parameters()), num_experts(model.config)
    if not experts:
        return total
    idle = 1 - (experts_per_token(model.config) or experts) / experts
    return total - int(idle * sum(p.numel() for name, p in model.named_parameters() if ".experts." in name))
