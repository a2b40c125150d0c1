"""Estimate of the activation memory of a trained vision tower, for the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...memory.shape import Lengths, Shape, kept_by_layers
from ...policy.towers import has_tower, in_tower


@dataclass(frozen=True, slots=True)
class Tower:
    """Size of a trained vision tower."""

    shape: Shape  # Shape of the tower's layers, in the form of a decoder's shape.
    patches: float  # Number of image patches per image token.

    @classmethod
    def of(cls, model: Any) -> Tower | None:
        """Read the size of a model's vision tower. Frozen parameters must have `requires_grad` false already. None
        means that the model has no tower, or that the tower is frozen."""
        config = model.config
        if not has_tower(config) or getattr(config, "vision_config", None) is None:
            return None
        if not any(parameter.requires_grad for name, parameter in model.named_parameters() if in_tower(name)):
            return None
        vision = config.vision_config

        def size(*names: str) -> int:  # Model families use different names for a size.
            return next((int(found) for name in names if (found := getattr(vision, name, None))), 0)

        hidden, heads = size("hidden_size", "embed_dim"), size("num_attention_heads", "num_heads") or 1
        inner = size("intermediate_size") or 4 * hidden
        shape = Shape(size("num_hidden_layers", "depth"), hidden, inner, hidden, hidden, hidden // heads, 0)
        names = (vision, "spatial_merge_size"), (config, "spatial_merge_size"), (config, "scale_factor")
        merged = next((side for of, name in names if (side := getattr(of, name, None))), None)
        patches = 1.0
        if pooled := getattr(vision, "pooling_kernel_size", None) or merged:
            patches = float(pooled) ** 2
        elif ratio := getattr(config, "downsample_ratio", None):
            patches = float(ratio) ** -2
        elif tokens := getattr(config, "mm_tokens_per_image", None):
            patches = float((vision.image_size // vision.patch_size) ** 2 / tokens)
        return cls(shape, patches)

    def bytes(self, tokens: int, lengths: Lengths, itemsize: int, checkpointing: int) -> int:
        """Estimate the activation bytes of the tower for a row of ``tokens``, as if all prompt tokens were image
        tokens."""
        patches = self.patches * tokens * lengths.prompts_share(tokens)
        return int(patches * sum(kept_by_layers(self.shape, itemsize, checkpointing)))


tower_of = Tower.of
