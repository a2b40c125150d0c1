"""`SourceFeature`: the choice of a run's rollout source (the object that generates completions)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from datasets import Dataset, IterableDataset

from ..batch import Group
from ..config import GRPOConfig
from ..data.columns import IMAGES, columns_of
from ..engine.protocol import Engine
from ..losses.advantages import AdvantageEstimator
from ..policy.loading import Policy
from ..runtime import registry
from .stages import RolloutSource

# A function (advantages [G], group, estimator, reward name -> weight) that returns changed advantages. Their shape is
# [G], or [sum C] with one advantage per completion token.
AddAdvantages = Callable[[torch.Tensor, Group, AdvantageEstimator, Mapping[str, float]], torch.Tensor]
# Argument of `GRPOTrainer` -> name of the extension that implements the argument.
SOURCES = {"tools": "tools", "rollout_func": "custom_rollouts", "environment_factory": "tools", "agent": "agents"}

TRUNCATED = "top_k (with top_p or min_p) truncates the sampler's distribution, but"
UNCORRECTED = "remove top_k, or set vllm_importance_sampling_correction: false."


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    model: Any
    reward_funcs: Any
    reward_processing_classes: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    quantization_config: Any
    peft_config: Any
    optimizer: Any
    sources: Mapping[str, Any]
    samples: bool  # Whether the run samples. False: a replay of recorded groups, without an engine.
    replaced: frozenset[str]
    adds_metrics: bool

    @property
    def has_images(self) -> bool:
        evaluations = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        datasets = (each for each in (self.train_dataset, *evaluations) if isinstance(each, Dataset | IterableDataset))
        return any({*IMAGES} & {*columns_of(each)} for each in datasets)


class SourceFeature:
    """The choice of a rollout source (the object that generates completions). The attributes describe the source.

    The base class chooses the vLLM engine. Extensions register subclasses by the hook ``source``."""

    rewards: Sequence[Any] = ()  # Further reward functions, with weight 1 each.
    reserved_tokens = 0  # Tokens of each sequence kept free for texts of tools or environments.
    writes_prompts = False  # Whether the rollout source writes prompts, so that rows may lack one.
    columns: Sequence[str] = ()  # Dataset columns that change the tokenised prompt, besides `prompts.COLUMNS`.
    # A function (dataset row, the row's name in errors) that returns further arguments of the chat template.
    template_arguments: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None
    may_add_images = False
    adds_columns = False  # Whether completions carry columns of their own for reward functions.
    adds_metrics = False  # Whether the source's `take_counts` may return metrics of any name.
    add_advantages: AddAdvantages | None = None
    notes: Sequence[str] = ()  # Lines to print for the user.
    trl_attributes: Mapping[str, Callable[[], Any]] = {}  # Attribute of TRL's trainer -> getter.

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        """Return an object of this class if the trainer's arguments choose its rollout source, else None."""
        return cls()

    def check_policy(self, policy: Policy, config: GRPOConfig) -> None:
        """Raise a ValueError if the rollout source can't generate completions with this policy."""

    def empty_prompts(self, config: GRPOConfig) -> Dataset:
        """Return a dataset of empty prompts for a run without ``train_dataset``. Raise ValueError if one is needed."""
        raise ValueError("train_dataset is missing: pass a datasets.Dataset with a column `prompt`.")

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> RolloutSource:
        return engine

    def digests(self) -> dict[str, str]:
        """Return name -> digest of the user code that generates completions. A resumed run reports changes."""
        return {}

    def watch(self, record: Callable[[str, float, float], None]) -> None:
        """Call ``record(name, start, end)`` after each further tool or environment call (times: `perf_counter`)."""

    def close(self) -> None:
        """End the processes and threads that the rollout source started."""


def source_feature(arguments: TrainerArguments, config: GRPOConfig) -> SourceFeature:
    for name, extension in SOURCES.items():
        if arguments.sources[name]:
            registry.require(extension, name)
    if arguments.quantization_config is not None:
        registry.require("quantized", "quantization_config")
    chosen = [feature for kind in registry.hooks("source") if (feature := kind.of(arguments, config))]
    feature = chosen[0] if chosen else SourceFeature()
    if not arguments.samples:  # The recorded groups may come from a source with `add_advantages`.
        feature.add_advantages = next(iter(registry.hooks("add_advantages")), None)
    return feature
