"""Weights that a layer stores packed, such as quantised ones. An extension finds them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..runtime import registry


class PackedWeight(Protocol):
    """Stored weight of a layer: W of y = x W^T + b, (out, in)."""

    layer: Any

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the packed values and their scales."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T, (..., out), as the layer does."""

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Unpack into the matrix for products: a new tensor (out, in), rounded to ``dtype`` at the end."""


def packed_weight(module: Any) -> PackedWeight | None:
    """Return a layer's packed weight; None for other modules.

    Extensions offer functions of a module at the seam "packed_weight".
    """
    found = (find(module) for find in registry.hooks("packed_weight"))
    return next((packed for packed in found if packed is not None), None)


def packed_weights(model: torch.nn.Module) -> dict[str, PackedWeight]:
    """Return a model's packed weights by parameter name."""
    found = ((f"{name}.weight" if name else "weight", packed_weight(module)) for name, module in model.named_modules())
    return {name: packed for name, packed in found if packed is not None}
