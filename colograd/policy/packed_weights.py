"""Access to weights that a layer stores in a packed form, such as quantised weights. Extensions find such weights."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ..runtime import registry

# The packed (e.g. quantised) weight of a linear layer, W (out, in) in y = x W^T + b, as in `quantized/layers.py`:
# ``layer``, ``shape``, ``nbytes`` with quantisation scales, ``product(x)`` without the bias, ``values(dtype)``.
PackedWeight: TypeAlias = Any


def packed_weight(module: Any) -> PackedWeight | None:
    """Return the packed (e.g. quantised) weight of a layer, or None for a module without a packed weight. An extension
    lists a function (module) -> `PackedWeight` or None under "packed_weight" in its `HOOKS`."""
    found = (find(module) for find in registry.hooks("packed_weight"))
    return next((packed for packed in found if packed is not None), None)


def packed_weights(model: torch.nn.Module) -> dict[str, PackedWeight]:
    """Return all packed (e.g. quantised) weights of a model, by the name of the parameter."""
    found = ((f"{name}.weight" if name else "weight", packed_weight(module)) for name, module in model.named_modules())
    return {name: packed for name, packed in found if packed is not None}
