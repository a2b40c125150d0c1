"""Dropout in the policy: which parts of it drop, and how to turn that off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd


def largest_dropout(model: torch.nn.Module) -> float:
    """The largest probability of a dropout, an adapter's own (`lora_dropout`) aside; 0: there is none."""
    return max((float(getattr(owner, name)) for owner, name in _dropouts(model)), default=0.0)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every probability to 0: modules' own, and those that attention functions are called with."""
    for owner, name in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Each probability: the module that has it, and its attribute there."""
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            if "lora_dropout" not in path:
                yield module, "p"
            continue
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                yield module, name
