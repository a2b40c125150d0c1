"""Picks the way of publishing for a run."""

from __future__ import annotations

from typing import Protocol

import torch

from ..engine import Engine
from .copied import CopiedWeights


class Publisher(Protocol):
    """A way of publishing."""

    def publish(self, version: int) -> int: ...

    def describe(self) -> str: ...

    def differing(self) -> list[str]: ...


def publisher(wanted: str, policy: torch.nn.Module, engine: Engine) -> Publisher:
    """The publisher for ``weights: auto|copied``.

    Where policy and engine were loaded from the same checkpoint, the mapping is proved: a parameter that isn't
    bit-equal to its slice before anything was trained is mapped to the wrong place.
    """
    assert wanted in ("auto", "copied"), wanted
    return CopiedWeights(policy, engine)


def prove(chosen: Publisher) -> None:
    """Check that every slice holds its parameter's value, after both loaded the same checkpoint.

    Raises:
        RuntimeError: naming the parameters that differ.
    """
    differing = chosen.differing()
    if differing:
        raise RuntimeError(
            f"{len(differing)} parameters differ between the policy and the engine although both loaded the same "
            f"checkpoint ({', '.join(differing[:3])}): this architecture's weights are laid out in a way that isn't "
            "known yet."
        )
