"""`SourceFeature`: the choice of a run's rollout source, which generates the completions."""

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

# (advantages [G], group, estimator, reward name -> weight) -> advantages [G], or [sum C] for one per token.
AddAdvantages = Callable[[torch.Tensor, Group, AdvantageEstimator, Mapping[str, float]], torch.Tensor]
# `GRPOTrainer`'s argument -> the extension that implements it.
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
    samples: bool  # False: a replay of recorded groups, without an engine.
    replaced: frozenset[str]
    adds_metrics: bool

    @property
    def has_images(self) -> bool:
        evaluations = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        datasets = (each for each in (self.train_dataset, *evaluations) if isinstance(each, Dataset | IterableDataset))
        return any({*IMAGES} & {*columns_of(each)} for each in datasets)


class SourceFeature:
    """A rollout source (the object that generates completions), and the settings that it changes in a run.

    The base class is the vLLM engine. A run uses at most one subclass of the hook ``source``."""

    rewards: Sequence[Any] = ()  # In addition to the user's, with weight 1.
    reserved_tokens = 0  # Tokens of each sequence reserved for texts that arrive during the rollout.
    writes_prompts = False  # Whether a dataset's rows may lack a prompt.
    columns: Sequence[str] = ()  # Further dataset columns that the tokenised prompt depends on.
    # (dataset row, the row's name in errors) -> further arguments of the chat template.
    template_arguments: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None
    may_add_images = False
    adds_columns = False  # Whether rollouts add columns for reward functions.
    adds_metrics = False  # Whether `take_counts` may return metrics of any name.
    add_advantages: AddAdvantages | None = None
    notes: Sequence[str] = ()  # Lines to print for the user.
    trl_attributes: Mapping[str, Callable[[], Any]] = {}  # Name of a TRL trainer's attribute -> its value.

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        """Return an object of this class if the trainer's arguments choose its rollout source, else None."""
        return cls()

    def check_policy(self, policy: Policy, config: GRPOConfig) -> None:
        """Raise a ValueError if the rollout source can't generate completions with this policy."""

    def empty_prompts(self, config: GRPOConfig) -> Dataset:
        """Return the dataset to train on if the user passed none, or raise ValueError."""
        raise ValueError("train_dataset is missing: pass a datasets.Dataset with a column `prompt`.")

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> RolloutSource:
        return engine

    def digests(self) -> dict[str, str]:
        """Return digests of user code that generates completions, by name, to detect changes on resume."""
        return {}

    def watch(self, record: Callable[[str, float, float], None]) -> None:
        """Let each later call of a tool or environment call ``record(name, start, end)``."""

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
    if not arguments.samples:  # A user's rollout source may have made the recorded groups.
        feature.add_advantages = next(iter(registry.hooks("add_advantages")), None)
    return feature
