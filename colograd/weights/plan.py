"""Picks the way of publishing for a run."""

from __future__ import annotations

from typing import Protocol

import torch

from ..engine import Engine
from ..lora import Adapter
from .adapter import AdapterWeights, Unserved
from .copied import CopiedWeights
from .merged import MergedWeights


class Publisher(Protocol):
    """A way of publishing."""

    def publish(self, version: int) -> int: ...

    def describe(self) -> str: ...

    def differing(self) -> list[str]: ...


def check_choice(wanted: str, adapter: Adapter | None) -> Adapter | None:
    """The adapter that the engine is to serve; None: none, or one that is merged.

    Raises:
        ValueError: ``weights: adapter`` can't be had.
    """
    if wanted == "adapter" and adapter is None:
        raise ValueError(
            "weights is 'adapter', but the policy is trained whole: set use_peft: true (or give peft_config), or set "
            "weights: auto."
        )
    if wanted == "adapter" and adapter is not None and adapter.why_merged:
        raise ValueError(f"weights is 'adapter', but {adapter.why_merged}: set weights: auto (merged copies).")
    return None if adapter is None or adapter.why_merged or wanted == "copied" else adapter


def publisher(wanted: str, policy: torch.nn.Module, engine: Engine, adapter: Adapter | None = None) -> Publisher:
    """The publisher for ``weights: auto|copied|adapter``; ``adapter`` is what the policy trains, if not itself.

    Where policy and engine were loaded from the same checkpoint, the mapping is proved: a parameter that isn't
    bit-equal to its slice before anything was trained is mapped to the wrong place.
    """
    base = CopiedWeights
    if adapter is None:
        return base(policy, engine)
    if check_choice(wanted, adapter) is None:
        return MergedWeights(policy, engine, adapter.why_merged or "weights: copied")
    try:
        return AdapterWeights(policy, engine, base(policy, engine))
    except Unserved as unserved:
        if wanted == "adapter":
            raise ValueError(f"weights is 'adapter', but {unserved}: set weights: auto (merged copies).") from None
        return MergedWeights(policy, engine, str(unserved))


def prove(chosen: Publisher) -> None:
    """Check that every slice holds its parameter's value, after both loaded the same checkpoint.

    Raises:
        RuntimeError: naming the parameters that differ.
    """
    differing = getattr(chosen, "base", chosen).differing()  # an adapter isn't in the checkpoint
    if differing:
        raise RuntimeError(
            f"{len(differing)} parameters differ between the policy and the engine although both loaded the same "
            f"checkpoint ({', '.join(differing[:3])}): this architecture's weights are laid out in a way that isn't "
            "known yet."
        )
