"""Preparation of a run before its engine: the arguments of a `GRPOTrainer` become a `Task`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from ..batch import TEACHER, ModelInput
from ..config import GRPOConfig
from ..data import PromptDataset
from ..data.columns import columns_of
from ..engine.arguments import check_split
from ..engine.building import check_vllm
from ..engine.sampling import check_sampling
from ..extensions.agents.prompts import with_prompts
from ..extensions.agents.sessions import Agent, agent_reward
from ..extensions.distillation.teacher import check_teacher
from ..extensions.experts.engine.lora import why_no_slots
from ..extensions.experts.routing import num_experts
from ..extensions.images.data import has_images
from ..extensions.quantized.checkpoints import take_quantization
from ..extensions.tools.tool_format import ToolFormat
from ..extensions.tools.toolbox import Toolbox, environment_reward
from ..losses.objective import Objective
from ..memory.segments import expand_segments
from ..parallel import watchdog
from ..parallel.layout import Place, check_engines, check_places
from ..parallel.ranks import gather, on_all_ranks
from ..policy.layers import check_compiled
from ..policy.liger import check_liger
from ..policy.loading import Policy, load_policy, proven_with_images
from ..policy.outline import note_on_cpu
from ..policy.reference import check_reference
from ..policy.supported import check_shared_rows, check_supported
from ..reporting.console import Console
from ..rewards import RewardFunction, Scorer, resolve_rewards, with_models
from ..rewards.calling import check_columns_for
from ..rewards.functions import as_list
from ..runtime import process
from ..runtime.importing import find_object, is_import_path
from ..sharding import check_sharding
from ..weights import check_adapter_in_parts, check_choice
from .best_metric import check_best_metric
from .prompts import Prompts, eval_prompts_of, image_reader_of, prompts_with_images, train_prompts_of


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a `GRPOTrainer`, and flags for the stages that a subclass replaces."""

    model: Any
    reward_funcs: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    reward_processing_classes: Any
    quantization_config: Any
    peft_config: Any
    tools: Any
    rollout_func: Any
    environment_factory: Any
    agent: Any
    optimizer: Any
    samples: bool  # False: groups are read from a record, and no engine is built
    needs_columns: bool  # False: a subclass replaces `generate` or `score`
    generates: bool = False  # whether a subclass replaces `generate`
    adds_metrics: bool = False  # whether a subclass or a callback may add metrics to an evaluation


@dataclass(frozen=True, slots=True)
class Task:
    """Everything a run needs except its engine."""

    policy: Policy
    train_prompts: Prompts
    eval_prompts: Any  # a PromptDataset, a dict of PromptDatasets, or None
    seen: list[ModelInput]  # one prompt with images, to prove rows and weights on; empty: no images
    rewards: list[RewardFunction]
    scorer: Scorer
    toolbox: Toolbox | None
    tool_format: ToolFormat | None
    rollout_func: Any
    agent: Agent | None
    objective: Objective

    @property
    def prompts(self) -> list[Prompts]:
        """All prompts: training first, then each evaluation."""
        parts = self.eval_prompts.values() if isinstance(self.eval_prompts, dict) else [self.eval_prompts]
        return [self.train_prompts, *(part for part in parts if part is not None)]


def prepare(given: Given, args: GRPOConfig, closing: ExitStack) -> Task:
    """Check the run, load the policy, tokenise the prompts. A collective: bad input is a ValueError on all ranks.

    Args:
        closing: stack that closes the processes of rewards and tools.
    """
    watchdog.set_limit(args.rank_timeout)
    expand_segments(args)
    places = gather(Place.here(args.device))
    with on_all_ranks("the start"):
        check_places(places)
        check_engines(args.layout, places)
        _check_config(given, args)
        objective = Objective.from_config(args)
        toolbox = toolbox_of(args, given.tools, given.environment_factory)
        if toolbox is not None:
            closing.callback(toolbox.close)
        rollout_func = rollout_func_of(given.rollout_func, toolbox, args)
        agent = agent_of(given.agent, rollout_func, toolbox, args)
        check_carry_over(args, given, _has_images(given))
        own = own_rewards(toolbox, agent)
        rewards = rewards_of(with_models(given.reward_funcs, given.reward_processing_classes, args), args, own)
        scorer = Scorer(rewards, args.reward_workers, args.reward_timeout, args.reward_on_error, on_gpu=not args.on_cpu)
        scorer.environments = None if toolbox is None else toolbox.environments
        closing.callback(scorer.close)
        watchdog.progress("loading the model")
        policy = load_policy(given.model, given.processing_class, args, given.peft_config, _has_images(given))
        if given.samples:
            policy = merged_beside_experts(policy, args)
        check_shared_rows(policy.model, args.sequence_parallel_size, policy.why_padded)
        check_choice(args.weights, policy.adapter, args.cuts_weights)
        if args.tensor_parallel:
            check_adapter_in_parts(policy.adapter, args.sharding)
        check_split(args, policy.model.config)
        objective = dataclasses.replace(objective, router_coef=policy.router_coef(args))
        check_reference(args, policy)
        check_teacher(args, policy)
        check_compiled(args, policy.why_padded)
        args.resolve_precision(policy.model.dtype)
        tool_format = tool_format_of(toolbox, policy, args)
        check_agent_model(agent, policy, args)
        train_dataset, eval_dataset = (
            data if agent is None else with_prompts(data) for data in (given.train_dataset, given.eval_dataset)
        )
        train_prompts = train_prompts_of(train_dataset, policy, args, toolbox)
        eval_prompts = eval_prompts_of(eval_dataset, policy, args, toolbox)
        check_teacher_column(args, train_prompts)
        seen = prompts_with_images([train_prompts], policy, toolbox)
        policy = proven_with_images(policy, seen) if args.on_cpu else policy
        check_best_metric(args, rewards, eval_prompts, given.adds_metrics or inspect.isclass(rollout_func))
        if rollout_func is None and agent is None and given.needs_columns:
            check_rewards(rewards, train_prompts, toolbox)
    return Task(
        policy, train_prompts, eval_prompts, seen, rewards, scorer, toolbox, tool_format, rollout_func, agent,
        objective,
    )  # fmt: skip


def _check_config(given: Given, args: GRPOConfig) -> None:
    """Refuse bad settings before anything is loaded; the configuration and the model's name are enough."""
    args.check_for_trainer()
    take_quantization(args, given.model, given.quantization_config)
    check_supported(given.model, args, given.peft_config, _has_images(given))
    if args.layout.is_main and (note := note_on_cpu(given.model, args)):
        Console(enabled=True, bars=False).warn(note)
    if given.samples:
        check_vllm()
        check_sampling(args)
    check_sharding(args, given.optimizer)
    if args.tensor_parallel and not given.samples:
        raise ValueError(
            f"sharding is {args.sharding!r}, but recorded steps are trained without an engine in whose layout the "
            "policy could lie: set sharding: gradients or fsdp."
        )
    check_liger(args)


def _has_images(given: Given) -> bool:
    """Return whether a dataset has a column of images."""
    evaluations = given.eval_dataset.values() if isinstance(given.eval_dataset, dict) else [given.eval_dataset]
    datasets = (each for each in (given.train_dataset, *evaluations) if isinstance(each, Dataset | IterableDataset))
    return any(has_images(columns_of(each)) for each in datasets)


def merged_beside_experts(policy: Policy, args: GRPOConfig) -> Policy:
    """Return the policy, with merged copies of its adapter for the engine if vLLM has no slots for it in a mixture."""
    adapter = policy.adapter
    if adapter is None or adapter.why_merged or not num_experts(policy.model.config):
        return policy
    why = why_no_slots(args.on_cpu)
    if why and args.layout.is_main:
        Console(enabled=True, bars=False).warn(
            f"adapter: the engine gets merged copies of the weights that it adapts, not its matrices: {why}"
        )
    return dataclasses.replace(policy, adapter=dataclasses.replace(adapter, why_merged=why))


def prepared_config(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    """Prepare the process for a configuration; make TRL's default if there is none.

    Raises:
        ValueError: the configuration is another trainer's.
    """
    if args is not None and not isinstance(args, GRPOConfig):
        kind = type(args)
        raise ValueError(
            f"args is a {kind.__module__.partition('.')[0]}.{kind.__name__}, but must be Colograd's own, which has "
            "further fields: from colograd import GRPOConfig."
        )
    if args is None:
        loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = str(model) if isinstance(model, str | os.PathLike) else loaded_from
        args = GRPOConfig(output_dir=f"{os.path.basename(name.rstrip('/')) or type(model).__name__}-GRPO")
    process.quiet_logs(args.verbose)
    if args.on_cpu:
        process.keep_freed_memory()
    return args


def toolbox_of(args: GRPOConfig, tools: Any, environment_factory: Any) -> Toolbox | None:
    """Return the run's tools and environments, if any. Raise a ValueError for settings of tools without a tool."""
    if tools or environment_factory is not None:
        most = args.environments_at_once if args.reward_call == "group" else None  # else one call waits for all
        return Toolbox(tools, environment_factory, args.tool_workers, args.tool_timeout, args.main_thread_tools, most)
    if args.main_thread_tools:
        raise ValueError(
            f"main_thread_tools is {args.main_thread_tools}, but there are neither tools nor environments: remove it."
        )
    return None


_TRUNCATED = "top_k (with top_p or min_p) truncates the sampler's distribution, but"
_UNCORRECTED = "remove it, or set vllm_importance_sampling_correction: false."


def rollout_func_of(rollout_func: Any, tools: Toolbox | None, args: GRPOConfig) -> Any:
    """Check the user's function or class that writes completions, and import it if it is a path; None if not set.

    Raises:
        ValueError: an import path without an object, no rollout source, tools in addition, or `router_replay`.
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
    if args.replays_truncation and rollout_func is not None and not hasattr(rollout_func, "generate"):
        raise ValueError(f"{_TRUNCATED} a rollout_func returns tokens, not what they were drawn from: {_UNCORRECTED}")
    return rollout_func


def agent_of(agent: Any, rollout_func: Any, tools: Toolbox | None, args: GRPOConfig) -> Agent | None:
    """Check the user's agent, and import it if it is a path; None if not set.

    Raises:
        ValueError: an import path without an object, a function with unknown arguments, tools or a rollout_func in
            addition, or a setting that agents don't support.
    """
    if agent is None:
        return None
    for name, other in (("rollout_func", rollout_func), ("tools", tools)):
        if other is not None:
            raise ValueError(
                f"agent and {name} are both set, but an agent's program alone decides what the model is asked, and "
                "runs tools itself: give one of them."
            )
    if args.router_replay:
        raise ValueError(
            "router_replay is true, but the experts of an agent's branches aren't recorded: set router_replay: false."
        )
    if args.replays_truncation:
        raise ValueError(f"{_TRUNCATED} of an agent's sessions it isn't recorded what is left: {_UNCORRECTED}")
    # `node agent.js`, `./agent.sh` and, where it is on PATH, `agent.sh` are commands.
    if isinstance(agent, str) and not set(agent) & {" ", "/"} and is_import_path(agent) and not shutil.which(agent):
        agent = find_object(agent, "agent", callable)
    return Agent.of(agent)


def check_agent_model(agent: Agent | None, policy: Policy, args: GRPOConfig) -> None:
    """Raise a ValueError if the model's sessions can't be trained."""
    if agent is not None and policy.processor is not None:
        raise ValueError(
            f"agent is set, but {policy.path} reads images, and an agent's sessions are of text: choose a model of "
            "text."
        )


def check_carry_over(args: GRPOConfig, given: Given, images: bool) -> None:
    """Raise a ValueError if `carry_over` is set, but a completion isn't just the engine's answer to a text."""
    others = {
        "tools": given.tools, "rollout_func": given.rollout_func, "environment_factory": given.environment_factory,
        "agent": given.agent, "a generate of your own": given.generates, "a column of images": images,
    }  # fmt: skip
    if args.carry_over is None or not any(others.values()):
        return
    name = next(name for name, value in others.items() if value)
    raise ValueError(
        f"carry_over is {args.carry_over}, but with {name} a completion isn't one answer of the engine to a text, and "
        "that alone can stop and go on: leave one of the two out."
    )


def own_rewards(tools: Toolbox | None, agent: Agent | None) -> list[Any]:
    """Return the rewards that aren't the user's functions: rewards of environments and of an agent."""
    found = [environment_reward(c, tools) for c in tools.reward_classes] if tools else []
    return [*found, agent_reward] if agent is not None else found


def tool_format_of(tools: Toolbox | None, policy: Policy, args: GRPOConfig) -> ToolFormat | None:
    """Return the policy's format of tool calls, if there are tools."""
    kwargs: dict[str, Any] = dict(args.chat_template_kwargs or {})  # type: ignore[arg-type]
    return ToolFormat(policy.tokenizer, kwargs, image_reader_of(policy)) if tools else None


def rewards_of(functions: Any, args: GRPOConfig, own: list[Any]) -> list[RewardFunction]:
    """Return the reward functions with their weights, and ``own`` rewards (see `own_rewards`) with weight 1."""
    given = as_list(functions)
    if args.distils and not (given or own or args.reward_weights):
        _check_without_rewards(args)
        return []
    if not own:
        return resolve_rewards(given, args.reward_weights)
    weights = args.reward_weights if args.reward_weights is not None else [1.0] * len(given)
    if len(weights) == len(given):  # else `resolve_rewards` raises
        given, weights = [*given, *own], [*weights, *[1.0] * len(own)]
    return resolve_rewards(given, weights)


def _check_without_rewards(args: GRPOConfig) -> None:
    """Refuse settings that need rewards in a run that only distils."""
    if args.dynamic_sampling:
        raise ValueError(
            "dynamic_sampling is true, but there is no reward function by whose rewards prompts could be kept: set it "
            "to false, or give reward_funcs."
        )
    best = str(args.metric_for_best_model or "").removeprefix("eval_")
    if best == "reward" or best.startswith(("rewards/", "pass@")):
        raise ValueError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, but there is no reward function: set "
            "metric_for_best_model: teacher_kl and greater_is_better: false."
        )


def check_teacher_column(args: GRPOConfig, prompts: Prompts) -> None:
    """Raise a ValueError if a prompt names an unknown one of several teachers, or if this can't be checked."""
    if not args.names_teachers:
        return
    known = ", ".join(args.teachers)
    if not isinstance(prompts, PromptDataset) or TEACHER not in columns_of(prompts.dataset):
        raise ValueError(
            f"teacher_model_name_or_path names several teachers ({known}), but the dataset "
            f"{'is a stream' if not isinstance(prompts, PromptDataset) else f'has no column {TEACHER!r}'}: give one "
            f"with a column {TEACHER!r} that names each prompt's, or leaves it empty."
        )
    strange = {str(name) for name in prompts.dataset[TEACHER] if name} - {*args.teachers}
    if strange:
        raise ValueError(
            f"The dataset's column {TEACHER!r} names {min(strange)!r}, but teacher_model_name_or_path has {known}: "
            "name one of them, or leave it empty."
        )


def check_rewards(rewards: list[RewardFunction], prompts: Prompts, tools: Toolbox | None) -> None:
    """Raise a ValueError if the dataset lacks a column of a reward function. A stream fails at its first rows."""
    if isinstance(prompts, PromptDataset) and not (tools is not None and tools.has_environments):
        check_columns_for(rewards, columns_of(prompts.dataset))
