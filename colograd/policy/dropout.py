"""Dropout in the policy: find its probabilities, and turn them off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd


def largest_dropout(model: torch.nn.Module) -> float:
    """Return the largest dropout probability, except an adapter's own (`lora_dropout`); 0: no dropout."""
    return max((float(getattr(owner, name)) for owner, name in _dropouts(model)), default=0.0)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every probability to 0, also the ones that modules pass to attention functions."""
    for owner, name in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield each probability's module and attribute name."""
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            if "lora_dropout" not in path:
                yield module, "p"
            continue
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                yield module, name
