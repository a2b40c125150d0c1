"""Prompts for evaluations: from the user's datasets, or from benchmarks that extensions implement."""

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
    """A benchmark for evaluations, e.g. GSM8K, that has its own prompts, sampling settings and scoring.

    An extension provides benchmarks at two hooks: `benchmark_names` (texts of a recipe -> {name in the log: text}) and
    `benchmark` (text, policy, args, maximum context of the vLLM engine -> `Benchmark`)."""

    dropped: bool = False  # whether some prompts were dropped because they don't fit into the context

    @property
    @abstractmethod
    def longest(self) -> int:
        """Number of tokens of the benchmark's longest prompt."""

    @property
    @abstractmethod
    def generations(self) -> int:
        """Largest number of sequences that vLLM samples for one question of the benchmark."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of questions in the benchmark."""

    @abstractmethod
    def evaluate(self, trainer: Any, name: str) -> dict[str, float]:
        """Run the benchmark with the weights in the vLLM engine, and return its metrics. A collective call."""

    def dropped_line(self) -> str:
        """Return a warning about the prompts that were dropped because they don't fit into the context, or ""."""
        return ""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """Return the names of the benchmark's metrics, without a prefix such as ``eval_``."""


def benchmark_names(texts: Sequence[str]) -> dict[str, str]:
    """Convert the texts that name benchmarks in a recipe to {name in the log: text in the recipe}."""
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
    """Tokenise the prompts of an evaluation. A dict of datasets becomes a dict of prompts, None stays None.

    Streamed datasets are read to their end. Names of benchmarks become a dict of `Benchmark` objects."""
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
