"""`SourceFeature`: a run generates completions by vLLM alone, with tools, by an agent, or by a user's function."""

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

# Changes a group's advantages: (advantages [G], group, estimator, weight of each reward function) -> advantages of
# shape [G] (one per completion) or [sum C] (one per completion token).
AddAdvantages = Callable[[torch.Tensor, Group, AdvantageEstimator, Mapping[str, float]], torch.Tensor]
# Maps each `GRPOTrainer` argument that changes how completions are generated to the extension that implements it.
SOURCES = {"tools": "tools", "rollout_func": "custom_rollouts", "environment_factory": "tools", "agent": "agents"}

# Parts of an error text for a rollout source that doesn't record the distribution which top_k has truncated.
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
    sources: Mapping[str, Any]  # Trainer arguments that choose a rollout source, by the names in SOURCES.
    samples: bool  # False means that recorded groups are read, and no vLLM engine is built.
    replaced: frozenset[str]  # Names of the trainer's methods that a subclass overrides (`generate`, `score`, ...).
    adds_metrics: bool  # Whether a subclass or a callback may add metrics to an evaluation.

    @property
    def has_images(self) -> bool:
        """Whether the training dataset or an evaluation dataset has a column of images."""
        evaluations = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        datasets = (each for each in (self.train_dataset, *evaluations) if isinstance(each, Dataset | IterableDataset))
        return any({*IMAGES} & {*columns_of(each)} for each in datasets)


class SourceFeature:
    """A rollout source (the object that generates completions), and the settings that it changes in a run.

    The base class generates completions with the vLLM engine. Extensions offer subclasses with other rollout sources at
    the hook ``source``. At most one of these subclasses is used, because their trainer arguments exclude each other."""

    rewards: Sequence[Any] = ()  # Reward functions that the rollout source adds, with weight 1.
    reserved_tokens = 0  # Tokens of each sequence reserved for texts that arrive during the rollout.
    writes_prompts = False  # Whether a dataset's rows may lack a prompt.
    columns: Sequence[str] = ()  # Dataset columns, besides the prompt, that the tokenised prompt depends on.
    # Function: (dataset row, the row's name in errors) -> further arguments of the chat template.
    template_arguments: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None
    may_add_images = False  # Whether completions can contain images that aren't in the dataset.
    adds_columns = False  # Whether reward functions get columns that aren't in the dataset.
    adds_metrics = False  # Whether the rollout source's `take_counts` may return metrics of any name.
    # Function that changes the advantages of a group. With a user's rollout source, or with recorded groups, an
    # extension's function at the hook ``add_advantages`` is used.
    add_advantages: AddAdvantages | None = None
    notes: Sequence[str] = ()  # Lines to print for the user.
    trl_attributes: Mapping[str, Callable[[], Any]] = {}  # Name of a TRL trainer attribute -> function for its value.

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        """Return an object of this class if the trainer's arguments choose the class's rollout source, else None."""
        return cls()

    def check_policy(self, policy: Policy, config: GRPOConfig) -> None:
        """Raise a ValueError if the rollout source can't generate completions with this policy."""

    def empty_prompts(self, config: GRPOConfig) -> Dataset:
        """Return the dataset to train on if the user passed none. The base class raises a ValueError."""
        raise ValueError("train_dataset is missing: pass a datasets.Dataset with a column `prompt`.")

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> RolloutSource:
        """Return the object that generates completions. The base class returns the vLLM engine."""
        return engine

    def digests(self) -> dict[str, str]:
        """Return digests, by name, of user code that generates completions. They are recorded to detect changes."""
        return {}

    def watch(self, record: Callable[[str, float, float], None]) -> None:
        """Make each later call of a tool or environment call ``record(name, start, end)``. Here: do nothing."""

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
