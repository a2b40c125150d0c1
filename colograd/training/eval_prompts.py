"""Prompts of evaluations: datasets, and benchmarks of extensions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..config import GRPOConfig
from ..data import PromptDataset, tokenize_prompts
from ..policy.loading import Policy
from ..rollout.features import SourceFeature
from ..runtime import registry
from .prompts import NO_FEATURE, prompt_rules, wanted_columns


class Benchmark(ABC):
    """An evaluation with prompts, sampling and judgement of its own.

    An extension makes it, at the seams `benchmark_names` (texts -> names in the log, with their texts) and
    `benchmark` (text, policy, args, context of the engine -> `Benchmark`).
    """

    dropped: bool = False  # whether some prompts don't fit into the context, see `dropped_line`

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest prompt."""

    @property
    @abstractmethod
    def generations(self) -> int:
        """Largest number of the engine's sequences for one question."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of questions."""

    @abstractmethod
    def evaluate(self, trainer: Any, name: str) -> dict[str, float]:
        """Take the benchmark with the published weights, and return its metrics. A collective."""

    def dropped_line(self) -> str:
        """Return a line for the user about prompts that don't fit into the context."""
        return ""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """Return the usual names of metrics, without the evaluation's prefix."""


def benchmark_names(texts: Sequence[str]) -> dict[str, str]:
    """Map the names of benchmarks in the log to their texts in a recipe."""
    registry.require("evaluation", f"exams: {list(texts)}")
    (names_of,) = registry.hooks("benchmark_names")
    return dict(names_of(texts))


def eval_prompts_of(
    dataset: Any,
    policy: Policy,
    args: GRPOConfig,
    feature: SourceFeature = NO_FEATURE,
    context: int | None = None,
    name: str = "eval",
) -> Any:
    """Return the prompts to evaluate on, in the form of ``dataset``: one, a dict, or None.

    Streams are read to their end. Names of benchmarks become a dict of benchmarks."""
    if dataset is None or isinstance(dataset, PromptDataset | Benchmark):
        return dataset
    if isinstance(dataset, str) or (isinstance(dataset, list | tuple) and all(isinstance(n, str) for n in dataset)):
        dataset = benchmark_names([dataset] if isinstance(dataset, str) else dataset)
    if isinstance(dataset, dict):
        texts = {name: part for name, part in dataset.items() if isinstance(part, str)}
        made: dict[str, Benchmark] = {}
        if texts:
            benchmark_names([*texts.values()])
            (benchmark_of,) = registry.hooks("benchmark")
            made = {name: benchmark_of(text, policy, args, context) for name, text in texts.items()}
        return {
            name: made[name] if name in made else eval_prompts_of(part, policy, args, feature, context, name)
            for name, part in dataset.items()
        }
    return tokenize_prompts(
        wanted_columns(dataset, policy, args, feature, name), prompt_rules(policy, args, name, context, feature)
    )
