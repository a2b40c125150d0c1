"""No publishing: the policy trains alone."""

from __future__ import annotations

from ..engine.vllm_engine import Engine
from .way import Publisher


class Unpublished(Publisher):
    """For a run without an engine: nothing is moved, and nobody reads the weights but the policy.

    Args:
        engine: what stands in the engine's place, and says which step the weights are of.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def publish(self, version: int) -> int:
        self.engine.stamp(version)
        return 0

    def describe(self) -> str:
        return ""

    def differing(self) -> list[str]:
        return []
