"""`NoEngine` stands in an engine's place where nothing is sampled: vLLM is neither built nor imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ..batch import Group, Prompt
from ..config import GRPOConfig
from .sampling import Sampling
from .vllm_engine import Engine

T = TypeVar("T")


class NoEngine(Engine):
    """Holds no weights and samples nothing, for training what was recorded.

    Its ranks are those of an engine, the first of which has the groups of all of them.

    Args:
        context: tokens that a sequence may have.
    """

    def __init__(self, config: GRPOConfig, dtype: torch.dtype, context: int) -> None:
        self.layout, self.context = config.layout, context
        self.dtype = self.head_dtype = dtype
        self.version: int | None = None
        self.sleeps = self.asleep = False
        self.max_sequences = sys.maxsize
        self.weight_bytes = self.kv_tokens = 0

    def describe(self) -> str:
        return "engine: none, as nothing is sampled"

    def warnings(self, config: GRPOConfig) -> Iterator[str]:
        yield from ()

    def stamp(self, version: int) -> None:
        self.version = version

    def on_engine_leader(self, work: Callable[[], T], others: T) -> T:
        return others if self.layout.engine_place else work()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """
        Raises:
            ValueError: there is a prompt, whose group isn't recorded.
        """
        if prompts:
            places = ", ".join(str(prompt.position) for prompt in prompts[:3])
            raise ValueError(
                f"{len(prompts)} group(s) of the round from step {version} aren't recorded (the first at position "
                f"{places}), and there is no engine to sample them: a replay takes what the journal has."
            )
        yield from ()

    def close(self) -> None:
        """Nothing is to be freed."""
