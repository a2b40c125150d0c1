"""`ToolFeature`: adds tools and environments to a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

from datasets import Dataset

from ...config import GRPOConfig
from ...data.columns import EMPTY
from ...engine.protocol import Engine
from ...policy.loading import Policy
from ...rollout.features import SourceFeature, TrainerArguments
from ...rollout.statistics import RolloutStatistics
from ...training.preparation import prompt_rules, reader_of
from .conversations import Conversations
from .tool_format import ToolFormat
from .toolbox import Toolbox, environment_reward

OBSERVATION = 1024  # Context tokens that are reserved for the content that an environment's `reset` returns.


class ToolFeature(SourceFeature):
    form: ToolFormat
    may_add_images = True

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.rewards = [environment_reward(kind, toolbox) for kind in toolbox.reward_classes]
        self.template_arguments, self.notes = toolbox.template_arguments, toolbox.notes
        self.close = toolbox.close  # type: ignore[method-assign]
        if toolbox.factories:
            self.reserved_tokens, self.writes_prompts, self.adds_columns = OBSERVATION, True, True
        if toolbox.by_name:
            self.columns = ("environment",)
        self.trl_attributes = {
            "tools": lambda: toolbox.functions,
            "environments": lambda: toolbox.environments.latest,
            "environment_factories": lambda: toolbox.factories or None,
        }

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        tools, factory = arguments.sources["tools"], arguments.sources["environment_factory"]
        if tools or factory is not None:
            # No limit with `reward_call: all`, which frees no environment before all groups are sampled.
            most = config.environments_at_once if config.reward_call == "group" else None
            workers, timeout = config.tool_workers, config.tool_timeout
            return cls(Toolbox(tools, factory, workers, timeout, config.main_thread_tools, most))
        if names := config.main_thread_tools:
            raise ValueError(f"main_thread_tools is {names}, but there is no tool or environment: remove the setting.")
        return None

    def check_policy(self, policy: Policy, config: GRPOConfig) -> None:
        kwargs: dict[str, Any] = dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]
        self.form = ToolFormat(policy.tokenizer, kwargs, reader_of(policy))

    def empty_prompts(self, config: GRPOConfig) -> Dataset:
        """Return a dataset of empty prompts for one generation. An environment's `reset` writes each prompt's text."""
        if not self.toolbox.factories:
            return super().empty_prompts(config)
        if self.toolbox.by_name:
            raise ValueError(
                "train_dataset is missing, but environment_factory is a dict: pass a single factory, or a dataset "
                "whose column `environment` names each row's factory."
            )
        if config.max_steps <= 0:
            raise ValueError(
                f"max_steps is {config.max_steps}, but a run without a dataset needs an end: set max_steps."
            )
        rows = (config.prompts_per_step or 1) * (config.steps_per_generation or 1)
        return Dataset.from_dict({"prompt": [EMPTY] * rows})

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> Conversations:
        rules = prompt_rules(policy, config, "reset", None, self)
        rules = dataclasses.replace(rules, max_prompt_tokens=engine.context - 1, overlong="drop")
        return Conversations(engine, self.toolbox, self.form, rules, config.max_tool_calling_iterations)

    def watch(self, record: Callable[[str, float, float], None]) -> None:
        self.toolbox.on_call = record


def call_metrics(statistics: RolloutStatistics, metrics: dict[str, float]) -> None:
    if (calls := statistics.counts.get("tools/calls")) is not None:
        metrics["tools/call_frequency"] = calls / max(len(statistics.lengths), 1)
        metrics["tools/failure_frequency"] = statistics.counts["tools/failures"] / calls if calls else 0.0
