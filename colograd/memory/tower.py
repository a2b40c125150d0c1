"""Bytes that a vision tower keeps of the pictures in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..policy.images import has_tower, in_tower
from .shape import Lengths, Shape, layer_bytes


@dataclass(frozen=True, slots=True)
class Tower:
    """What a policy sees with."""

    shape: Shape  # of its layers, as if they were a decoder's
    patches: float  # that it computes for one token of a picture

    @classmethod
    def of(cls, model: Any) -> Tower | None:
        """Of a model with its frozen parameters marked as such; None: it has none, or one that keeps nothing, as none
        of it is trained."""
        config = model.config
        if not has_tower(config) or getattr(config, "vision_config", None) is None:
            return None
        if not any(parameter.requires_grad for name, parameter in model.named_parameters() if in_tower(name)):
            return None
        return cls(_shape(config.vision_config), _patches(config))

    def bytes(self, tokens: int, lengths: Lengths, itemsize: int, checkpointing: int) -> int:
        """An estimate of what is kept for the backward pass of a row of ``tokens``, as if all of its prompts' tokens
        were pictures'. Features are computed once for all completions of a prompt."""
        patches = self.patches * tokens * lengths.prompts_share(tokens)
        layer, layers = layer_bytes(self.shape, itemsize), self.shape.layers
        again = -(-layers // checkpointing) if checkpointing else 0
        kept = (layers - again) * layer + again * self.shape.hidden * itemsize + (layer if again else 0)
        return int(patches * kept)


def _shape(config: Any) -> Shape:
    """The families name its sizes in two ways."""

    def size(*names: str) -> int:
        return next((int(found) for name in names if (found := getattr(config, name, None))), 0)

    hidden, heads = size("hidden_size", "embed_dim"), size("num_attention_heads", "num_heads") or 1
    inner = size("intermediate_size") or 4 * hidden
    return Shape(size("num_hidden_layers", "depth"), hidden, inner, hidden, hidden, hidden // heads, 0)


def _patches(config: Any) -> float:
    vision = config.vision_config
    if merged := getattr(vision, "spatial_merge_size", None) or getattr(config, "scale_factor", None):
        return float(merged) ** 2
    if tokens := getattr(config, "mm_tokens_per_image", None):
        return float((vision.image_size // vision.patch_size) ** 2 / tokens)
    return 1.0
