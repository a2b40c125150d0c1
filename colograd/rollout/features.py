"""`SourceFeature`: a way of writing completions (the engine, tools, an agent), chosen by the trainer's arguments."""

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
from ..rewards.scoring import Lender
from ..runtime import registry
from .stages import RolloutSource

# (advantages [G], group, estimator, weight of each reward function) -> advantages [G], or [sum C] with one per token.
AddAdvantages = Callable[[torch.Tensor, Group, AdvantageEstimator, Mapping[str, float]], torch.Tensor]
# The trainer's arguments that choose a source, and the extension of each.
SOURCES = {"tools": "tools", "rollout_func": "custom_rollouts", "environment_factory": "tools", "agent": "agents"}

# Parts of errors for a source that doesn't record a truncated distribution.
TRUNCATED = "top_k (with top_p or min_p) truncates the sampler's distribution, but"
UNCORRECTED = "remove it, or set vllm_importance_sampling_correction: false."


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    """The arguments of a `GRPOTrainer`, and the changes of its subclass."""

    model: Any
    reward_funcs: Any
    reward_processing_classes: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    quantization_config: Any
    peft_config: Any
    optimizer: Any
    sources: Mapping[str, Any]  # by the names in SOURCES
    samples: bool  # False: groups are read from a record, and no engine is built
    replaced: frozenset[str]  # stages that a subclass replaces
    adds_metrics: bool  # whether a subclass or a callback may add metrics to an evaluation

    @property
    def has_images(self) -> bool:
        """Whether a dataset has a column of images."""
        evaluations = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        datasets = (each for each in (self.train_dataset, *evaluations) if isinstance(each, Dataset | IterableDataset))
        return any({*IMAGES} & {*columns_of(each)} for each in datasets)


class SourceFeature:
    """A rollout source, and the changes that it needs elsewhere in a run. The base class's source is the engine.

    A subclass has another source. Extensions offer subclasses at the seam ``source``. `of` returns an object for at
    most one of them, because each refuses the arguments of the others.
    """

    rewards: Sequence[Any] = ()  # reward functions of its own, with weight 1
    lender: Lender | None = None  # lends objects to completions until they are scored
    reserved_tokens = 0  # tokens of a sequence for texts that come during the rollout
    writes_prompts = False  # whether rows need no prompt
    columns: Sequence[str] = ()  # further columns that a prompt depends on
    schemas: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None  # a row's tools for the chat template
    may_add_images = False  # whether completions get images that no dataset has
    adds_columns = False  # whether reward functions get columns that aren't the dataset's
    adds_metrics = False  # whether `take_counts` of the source may return metrics of any name
    # Changes the advantages of a group. An extension offers its own at the seam ``add_advantages``, too, for sources of
    # the user's and for records.
    add_advantages: AddAdvantages | None = None
    notes: Sequence[str] = ()  # lines for the user
    trl_attributes: Mapping[str, Callable[[], Any]] = {}  # values of TRL's attributes of a trainer

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        """Return the feature if the arguments choose it, else None."""
        return cls()

    def check_policy(self, policy: Policy, config: GRPOConfig) -> None:
        """Raise a ValueError if the policy doesn't fit."""

    def empty_prompts(self, config: GRPOConfig) -> Dataset:
        """Return the rows of a run without a dataset."""
        raise ValueError("train_dataset is missing: give a datasets.Dataset with a column `prompt`.")

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> RolloutSource:
        """Return the source of completions."""
        return engine

    def digests(self) -> dict[str, str]:
        """Return digests of the user's code, for the settings of a record."""
        return {}

    def watch(self, record: Callable[[str, float, float], None]) -> None:
        """Call ``record`` with the name, the start and the end of each call of the user's code."""

    def close(self) -> None:
        """End processes and threads."""


def source_feature(arguments: TrainerArguments, config: GRPOConfig) -> SourceFeature:
    """Return the `SourceFeature` that the trainer's arguments choose; by default the base class."""
    for name, extension in SOURCES.items():
        if arguments.sources[name]:
            registry.require(extension, name)
    chosen = [feature for kind in registry.hooks("source") if (feature := kind.of(arguments, config))]
    feature = chosen[0] if chosen else SourceFeature()
    if not arguments.samples:  # a source of the user's may have written the record
        feature.add_advantages = next(iter(registry.hooks("add_advantages")), None)
    return feature
