"""What a trainer is given, made ready: tools, reward functions, tokenised prompts."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from datasets import Dataset, IterableDataset

from ..config import GRPOConfig
from ..data import PromptDataset, PromptLoader, PromptRules, PromptStream, StepOrder, StreamLoader, tokenize_prompts
from ..data.columns import check_columns, columns_of
from ..data.images import COLUMNS as IMAGES
from ..data.images import ImageReader
from ..policy.loading import Policy
from ..reporting.console import Console
from ..rewards import RewardFunction, resolve_rewards
from ..rewards.calling import check_columns_for
from ..rewards.functions import as_list
from ..rollout.tool_format import ToolFormat
from ..rollout.toolbox import EMPTY, Toolbox, environment_reward
from ..runtime import process
from ..runtime.importing import find_object


def prepared_config(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    """The configuration, TRL's default one if none is given; and the process ready for it.

    Raises:
        ValueError: it is another trainer's.
    """
    if args is not None and not isinstance(args, GRPOConfig):
        kind = type(args)
        raise ValueError(
            f"args is a {kind.__module__.partition('.')[0]}.{kind.__name__}, but must be Colograd's own, which has "
            "further fields: from colograd import GRPOConfig."
        )
    process.prepare_ranks()
    if args is None:
        loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = str(model) if isinstance(model, str | os.PathLike) else loaded_from
        args = GRPOConfig(output_dir=f"{os.path.basename(name.rstrip('/')) or type(model).__name__}-GRPO")
    process.quiet_logs(args.verbose)
    if args.on_cpu:
        process.keep_freed_memory()
    return args


def longest_completion(args: GRPOConfig) -> int:
    """Tokens a completion may have, in training or evaluation."""
    return max(args.max_completion_length or 0, args.max_completion_length_eval or 0)


def toolbox_of(args: GRPOConfig, tools: Any, environment_factory: Any) -> Toolbox | None:
    """The run's tools and environments, if it has any.

    Raises:
        ValueError: a tool or environment that isn't one, or settings of tools without any.
    """
    if tools or environment_factory is not None:
        return Toolbox(tools, environment_factory, args.tool_workers, args.tool_timeout, args.main_thread_tools)
    if args.main_thread_tools:
        raise ValueError(
            f"main_thread_tools is {args.main_thread_tools}, but there are neither tools nor environments: remove it."
        )
    return None


def rollout_func_of(rollout_func: Any, tools: Toolbox | None, args: GRPOConfig) -> Any:
    """The user's function or class that writes completions, if there is one.

    Raises:
        ValueError: its import path leads nowhere, it is no rollout source, there are tools, which it wouldn't call, or
            experts are to be replayed, of which it tells nothing.
    """
    if rollout_func is not None and tools is not None:
        raise ValueError(
            "rollout_func writes completions by itself, so that tools and environment_factory would never be used: "
            "give one or the other."
        )
    if isinstance(rollout_func, str):
        rollout_func = find_object(rollout_func, "rollout_func", callable)
    if isinstance(rollout_func, type) and not hasattr(rollout_func, "generate"):
        raise ValueError(
            f"rollout_func is the class {rollout_func.__name__}, which has no method `generate`, but must be a rollout "
            "source: see docs/architecture.md."
        )
    if args.router_replay and rollout_func is not None and not hasattr(rollout_func, "generate"):
        raise ValueError(
            "router_replay is true, but a rollout_func returns tokens, and not the experts that the engine chose for "
            "them: set router_replay: false, or write a rollout source, which yields the engine's own groups."
        )
    return rollout_func


def reset_rules(policy: Policy, args: GRPOConfig, tools: Toolbox, context: int) -> PromptRules:
    """How a prompt becomes tokens when an environment has changed it, in an engine with room for ``context``."""
    most = context - 1
    return dataclasses.replace(_rules(policy, args, "reset", None, tools), max_prompt_tokens=most, overlong="drop")


def tool_format_of(tools: Toolbox | None, policy: Policy, args: GRPOConfig) -> ToolFormat | None:
    """How the policy's chat template writes tool calls, where there are tools."""
    return ToolFormat(policy.tokenizer, dict(args.chat_template_kwargs or {})) if tools else None  # type: ignore[arg-type]


def rewards_of(functions: Any, args: GRPOConfig, tools: Toolbox | None) -> list[RewardFunction]:
    """The reward functions with their weights, and with weight 1 the environments that reward themselves."""
    own = [environment_reward(c, tools) for c in tools.reward_classes] if tools else []
    given = as_list(functions)
    if not own:
        return resolve_rewards(given, args.reward_weights)
    weights = args.reward_weights if args.reward_weights is not None else [1.0] * len(given)
    if len(weights) == len(given):  # else `resolve_rewards` says what is wrong
        given, weights = [*given, *own], [*weights, *[1.0] * len(own)]
    return resolve_rewards(given, weights)


def train_prompts_of(
    dataset: Any, policy: Policy, args: GRPOConfig, tools: Toolbox | None = None, context: int | None = None
) -> PromptDataset | PromptStream:
    """The prompts to train on, such that a completion has room behind each: tokenised, or to be while they are read.

    Without a dataset, empty ones for one generation, where one environment makes all of them and ``max_steps`` says
    when to end (as in TRL).

    Raises:
        ValueError: no dataset and no environment that does without, no room for a prompt, prompts that don't fill a
            round, or what tokenising finds.
    """
    rules = _rules(policy, args, "train", context, tools)
    if dataset is None:
        dataset = _empty_prompts(args, tools)
    if isinstance(dataset, IterableDataset):
        return PromptStream(_wanted(dataset, policy, args, tools, "train"), rules, args)
    prompts = tokenize_prompts(_wanted(dataset, policy, args, tools, "train"), rules)
    StepOrder.of(args, len(prompts))
    return prompts


def check_rewards(rewards: list[RewardFunction], prompts: PromptDataset | PromptStream, tools: Toolbox | None) -> None:
    """Whether the dataset has what the functions ask for, before a group is sampled; of a streamed one its rows tell.

    Raises:
        ValueError: a function needs a column that isn't there.
    """
    if isinstance(prompts, PromptDataset) and not (tools is not None and tools.has_environments):
        check_columns_for(rewards, columns_of(prompts.dataset))


def _empty_prompts(args: GRPOConfig, tools: Toolbox | None) -> Dataset:
    """A row for each prompt of one generation, all of whose text is an environment's.

    Raises:
        ValueError: there is no environment, or one per row's name, or no end.
    """
    if tools is None or not tools.has_environments:
        raise ValueError("train_dataset is missing: give a datasets.Dataset with a column `prompt`.")
    if tools.by_name:
        raise ValueError(
            "train_dataset is missing, but environment_factory is a dict, of which each row's column `environment` "
            "names one: give a dataset with that column, or a single factory."
        )
    if args.max_steps <= 0:
        raise ValueError(
            f"train_dataset is missing and max_steps is {args.max_steps}, but without a dataset nothing else says when "
            "to end: set max_steps."
        )
    rows = (args.prompts_per_step or 1) * (args.steps_per_generation or 1)
    return Dataset.from_dict({"prompt": [EMPTY] * rows})


def loader_of(prompts: PromptDataset | PromptStream, args: GRPOConfig) -> PromptLoader | StreamLoader:
    """One item is the list of prompts of one optimizer step on this rank."""
    if isinstance(prompts, PromptStream):
        return StreamLoader(prompts)
    return PromptLoader(prompts, StepOrder.of(args, len(prompts)))


def _wanted(dataset: Any, policy: Policy, args: GRPOConfig, tools: Toolbox | None, name: str) -> Any:
    """The dataset without what ``remove_unused_columns`` takes from the reward functions; with empty prompts where
    environments bring their own."""
    names = columns_of(dataset) if isinstance(dataset, Dataset | IterableDataset) else ()
    if tools is not None and tools.has_environments and names and "prompt" not in names:
        return dataset.map(lambda row: {"prompt": EMPTY})
    if args.remove_unused_columns and "prompt" in names:
        check_columns(dataset, name, policy.processor is not None)  # before the columns are gone that it looks for
        images = [column for column in IMAGES if column in names]
        named = ["environment"] if tools is not None and tools.by_name and "environment" in names else []
        return dataset.select_columns(["prompt", *images, *named])
    return dataset


def _rules(policy: Policy, args: GRPOConfig, name: str, context: int | None, tools: Toolbox | None) -> PromptRules:
    """How rows become prompts behind which there is room for a completion.

    Args:
        name: of the dataset in messages: train, eval or the user's.
        context: tokens that an engine which is there has room for.
    """
    completion = longest_completion(args)
    most = min(policy.context, args.vllm_max_model_length or policy.context, context or policy.context)
    limit = min(args.max_prompt_tokens or most, most - completion)
    if limit < 1:
        raise ValueError(
            f"max_completion_length is {completion}, but the context has {most} tokens: no room is left for a "
            "prompt. Lower max_completion_length or raise vllm_max_model_length."
        )
    return PromptRules(
        policy.tokenizer,
        max_prompt_tokens=limit,
        overlong=args.overlong_prompts,
        chat_template_kwargs=dict(args.chat_template_kwargs or {}),  # type: ignore[arg-type]
        name=name,
        tools=tools.schemas if tools else None,
        images=None if policy.processor is None else ImageReader(policy.processor, policy.image_token),
        tell=Console(args.layout.is_main, bars=False).say,
    )


def eval_prompts_of(
    dataset: Any,
    policy: Policy,
    args: GRPOConfig,
    tools: Toolbox | None = None,
    context: int | None = None,
    name: str = "eval",
) -> Any:
    """Likewise for evaluation: of one dataset, of a dict of them, or None for none. Tokenised ones stay as they are.

    Iterable ones are read to their end: evaluation takes every prompt once.
    """
    if dataset is None or isinstance(dataset, PromptDataset):
        return dataset
    if isinstance(dataset, dict):
        given: dict[str, Any] = dataset
        return {name: eval_prompts_of(part, policy, args, tools, context, name) for name, part in given.items()}
    return tokenize_prompts(_wanted(dataset, policy, args, tools, name), _rules(policy, args, name, context, tools))
