"""Building the engine next to the policy before the first step, or only the policy; and a description of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch

from ..config import GRPOConfig
from ..data import PromptDataset
from ..data.vocabulary import size_of
from ..engine.building import check_experts
from ..engine.protocol import Engine
from ..engine.sampling import Sampling
from ..engine.vllm_engine import Needs, VLLMEngine
from ..extensions.agents.context import ChatFormat
from ..extensions.agents.engine.chat_api import ChatAPI
from ..extensions.agents.session import Limits
from ..extensions.agents.session_log import SessionLog
from ..extensions.agents.sessions import Agent, AgentSessions, AgentSettings
from ..extensions.distillation.teacher import check_teacher_context
from ..extensions.experts.routing import num_experts
from ..extensions.hybrids.recurrent import keep_uncompiled
from ..extensions.images.towers import has_tower, reads_text_alone
from ..extensions.tools.conversations import Conversations
from ..extensions.tools.toolbox import Toolbox
from ..memory.choice import auto, least_checkpointing, plan_or_raise
from ..memory.description import RunDescription, Workload, describe_run, own_devices
from ..memory.device_turns import DeviceTurns
from ..memory.one_gpu import cheapest
from ..memory.shape import CacheNeed, Shape
from ..memory.table import CPU_SHARE, MemoryPlan
from ..parallel.ranks import gather, on_all_ranks
from ..policy.layers import compile_layers, forget_compiled
from ..policy.liger import apply_liger
from ..policy.loading import Policy
from ..policy.lora import unwrap
from ..policy.second_models import SecondModels, second_model_bytes, second_models
from ..reporting.metrics import PhaseTimes
from ..rollout.custom import CustomRollouts
from ..rollout.stages import RolloutSource
from ..rollout.store import RolloutStore
from ..runtime import process
from ..sharding import strategy_name
from ..weights import (
    WeightSync,
    bytes_apart,
    check_choice,
    expects_sharing,
    packed_parts,
    serves_packed,
    weight_sync,
)
from .prompts import Prompts, longest_completion, prompts_with_images, reset_rules, without_template
from .task import Task

# Tokens reserved behind the longest prompt for an environment's `reset`, unless the context is set or shorter.
OBSERVATION = 1024
SESSION = 4096  # tokens reserved in the same way for an agent's messages and tools


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine and a policy, or only the policy."""

    engine: Engine | None  # None: nothing is sampled
    weights: WeightSync | None  # gives the engine the policy's weights
    device_turns: DeviceTurns | None  # schedules the device's memory between engine and training
    memory: MemoryPlan
    second_models: SecondModels

    def describe(self) -> Iterator[str]:
        """Yield lines that describe the assembly to the user."""
        if self.engine is None or self.weights is None or self.device_turns is None:
            yield "engine: none, as nothing is sampled"
        else:
            yield self.engine.describe()
            yield self.weights.describe()
        yield from self.memory.table().splitlines()
        if self.device_turns is not None:
            yield from self.device_turns.notes
        for second in self.second_models.values():
            yield second.describe()

    def warnings(self, config: GRPOConfig, task: Task) -> Iterator[str]:
        """Yield lines that warn the user."""
        yield from (*config.notes, *config.advice())
        yield from () if self.engine is None else self.engine.warnings(config)
        yield from task.policy.warnings(config)
        for part in task.prompts:
            if isinstance(part, PromptDataset) and part.dropped:
                yield part.dropped_line()
        if task.rollout_func is None:
            yield from without_template(task.train_prompts, task.policy)


def assemble(
    config: GRPOConfig, task: Task, max_tokens: int, times: PhaseTimes, closing: ExitStack, samples: bool = True
) -> Assembly:
    """Build the engine, and move the policy to its place next to it. A collective.

    Args:
        max_tokens: tokens of a micro-batch; 0: not measured yet.
        closing: closes the engine.
        samples: False: build no engine, only the policy.

    Raises:
        ValueError: no room for the KV cache of one sequence or for training, settings that vLLM refuses, or an
            impossible way of publishing.
        RuntimeError: the engine doesn't read a parameter at its expected place.
    """
    policy, run = task.policy, read_run(config, task, max_tokens)
    with on_all_ranks("the teacher's context"):
        check_teacher_context(config, policy, needed_context(config, task))
    if not samples:
        plan = plan_or_raise(run.without_engine(), strategy_name(config))
        if not config.on_cpu:
            policy.model.to(config.device)
        with on_all_ranks("the second models"):
            return Assembly(None, None, None, plan, second_models(task.objective.needs, config, policy))
    with on_all_ranks("the engine's experts"):
        check_experts(num_experts(policy.model.config), config.on_cpu)
    plan = plan_or_raise(run, strategy_name(config))
    engine = _build_engine(config, task, plan, closing)
    with on_all_ranks("the plan of the weights"):
        weights = weight_sync(
            config.weights,
            policy.model,
            engine,
            untouched=policy.untouched,
            device=config.device,
            adapter=policy.adapter,
            cut="rows" if config.cuts_weights else "parts" if config.tensor_parallel else "",
            seen=next(iter(prompts_with_images(task.prompts, policy, task.toolbox)), None),
        )
    if config.on_cpu:
        process.give_back_freed_memory()  # the policy's former memory
    with on_all_ranks("the second models"):
        others = second_models(task.objective.needs, config, policy)
    apart = plan.policy_weights if config.cuts_weights else bytes_apart(policy.model, engine.tensors)
    plan = plan.with_engine(engine.weight_bytes, apart, engine.kv_tokens)
    return Assembly(engine, weights, DeviceTurns(engine, config, times), plan, others)


def _build_engine(config: GRPOConfig, task: Task, plan: MemoryPlan, closing: ExitStack) -> Engine:
    policy, context = task.policy, needed_context(config, task)
    end = policy.tokenizer.eos_token_id
    needs = Needs(
        end_tokens=() if end is None else (end,),
        adapter=check_choice(config.weights, policy.adapter, config.cuts_weights),
        sequences=most_sequences(config, task.prompts),
        trained=sampled_together(config),
        blank=policy.quantization is not None and policy.quantization.in_checkpoint,
        parts_of=partial(packed_parts, policy.model) if serves_packed(config, policy) else None,
        images=most_images(task.prompts, policy, task.toolbox, context),
        tokens=size_of(policy.tokenizer),
        text_alone=reads_text_alone(unwrap(policy.model)),
    )
    engine = VLLMEngine(policy.path, config, policy.model.dtype, context, plan.kv_bytes, needs)
    closing.callback(engine.close)
    with on_all_ranks("the check of the sampling settings"):
        for sampling in (Sampling.for_training(config), Sampling.for_evaluation(config)):
            engine.check(sampling)
    if policy.processor is not None:
        with on_all_ranks("the check of the processor"):
            engine.check_processor(policy.processor)
    return engine


def engine_alone(
    config: GRPOConfig, model: str, model_config: Any, end_tokens: tuple[int, ...], length: int, sequences: int,
    closing: ExitStack,
) -> Engine:  # fmt: skip
    """Build an engine with a checkpoint's own weights and no policy, for exams. A collective.

    Args:
        model: folder or Hub id; ``model_config`` is its configuration, as transformers reads it.
        end_tokens: tokens that end a completion, in addition to the checkpoint's.
        length: tokens of the longest sequence.
        sequences: completions that this engine will sample together.
        closing: closes the engine.
    """
    dtype = model_config.dtype if isinstance(model_config.dtype, torch.dtype) else torch.bfloat16
    given = dict(config.model_init_kwargs or {}).get("dtype", "auto")  # type: ignore[arg-type]
    dtype = dtype if given == "auto" else getattr(torch, str(given).removeprefix("torch."))
    kv_bytes = 0  # on a GPU vLLM fills its share of the memory
    with on_all_ranks("the engine"):
        check_experts(num_experts(model_config), config.on_cpu)
        if config.on_cpu:
            ranks = config.vllm_tensor_parallel_size
            need = CacheNeed.of(
                Shape.of(model_config.get_text_config()).split(ranks), dtype.itemsize, length, min(sequences, 256)
            )
            available = psutil.virtual_memory().available // process.local_world_size()
            kv_bytes = max(need.least, min(need.wanted, available // CPU_SHARE))
    needs = Needs(end_tokens=end_tokens, sequences=sequences, text_alone=has_tower(model_config))
    engine = VLLMEngine(model, config, dtype, length, kv_bytes, needs)
    closing.callback(engine.close)
    engine.stamp(0)
    return engine


def resolve_by_memory(config: GRPOConfig, task: Task, samples: bool = True) -> None:
    """Resolve the unset settings that depend on memory. A collective.

    ``sharding: auto`` becomes the least sharded way that leaves room. ``offload_optimizer: auto`` keeps on the host as
    little as it must. ``gradient_checkpointing`` is then on for as few layers as necessary."""
    if config.sharding == "auto":
        run = read_run(config, task, config.token_budget)
        able = run.strategies if samples else run.without_engine().strategies
        config.resolve_sharding(auto(replace(run, strategies=able)))
    if config.offload_optimizer == "auto":
        name = strategy_name(config)
        host = min(gather(psutil.virtual_memory().available // process.local_world_size()))
        kept = {} if config.on_cpu else cheapest(read_run(config, task, config.token_budget), name, host)
        config.resolve_offload(
            "streams" in kept,
            "offloads_gradients" in kept,
            "offloads_activations" in kept and task.policy.checkpointing[-1] == 1,
        )
    every = config.checkpointing
    if config.gradient_checkpointing is None:
        run = read_run(config, task, config.token_budget)
        every = least_checkpointing(run, strategy_name(config), task.policy.checkpointing)
    config.resolve_checkpointing(every)


def read_run(config: GRPOConfig, task: Task, max_tokens: int) -> RunDescription:
    """Describe the run in the numbers that its memory depends on."""
    policy = task.policy
    work = Workload(
        length=needed_context(config, task),
        sequences=sampled_together(config),
        tokens=max_tokens,
        prompt=max(part.longest for part in task.prompts),
        shares_prompts=not policy.why_padded,
    )
    others = second_model_bytes(task.objective.needs, config, policy)
    return describe_run(
        config,
        policy.model,
        own_devices(config.device, policy.model),
        work,
        shared=expects_sharing(config, policy),
        reference=others.get("reference", 0),
        teacher=others.get("teacher", 0),
    )


def most_images(prompts: Sequence[Prompts], policy: Policy, tools: Toolbox | None, context: int) -> int:
    """Return the maximum number of images in one engine request.

    With tools this is the context length, because each image needs a token."""
    if policy.processor is None:
        return 0
    return context if tools is not None else max(1, *(getattr(part, "most_images", 0) for part in prompts))


def sampled_together(config: GRPOConfig) -> int:
    """Return the number of completions of one generation in this rank's engine."""
    return config.groups_in_flight * (config.num_generations or 1)


def most_sequences(config: GRPOConfig, prompts: Sequence[Prompts]) -> int:
    """Return the number of completions of this rank's engine in its largest generation or evaluation.

    Args:
        prompts: prompts of training, then of each evaluation.
    """
    engines, each = config.layout.data_size, config.eval_generations()
    parts = [part for part in prompts[1:] if isinstance(part, PromptDataset)]
    evaluated = (-(-len(part) // engines) * getattr(part, "generations", each) for part in parts)
    return max(sampled_together(config), *evaluated, 1)


def needed_context(config: GRPOConfig, task: Task) -> int:
    """Return the maximum tokens of one sequence of the engine, prompt and completion together."""
    longest = max(part.longest for part in task.prompts) + longest_completion(config)
    told = OBSERVATION if task.toolbox is not None and task.toolbox.has_environments else 0
    told += SESSION if task.agent is not None else 0
    return config.vllm_max_model_length or min(longest + told, task.policy.context)


def rollout_source(engine: Engine, config: GRPOConfig, task: Task, trainer: Any) -> RolloutSource:
    """Return the source of completions: the user's source or function, conversations with tools, or the engine.

    Args:
        trainer: argument of a user's function; has the run's round.
    """
    write, tools = task.rollout_func, task.toolbox
    if hasattr(write, "generate"):
        source: RolloutSource = write(engine) if isinstance(write, type) else write
        return source
    if task.agent is not None:
        return agent_sessions(engine, config, task.agent, task.policy, trainer)
    if write is not None:
        return CustomRollouts(engine, lambda prompts: write(prompts, trainer), task.policy.end_tokens)
    if tools is not None and task.tool_format is not None:
        rules = reset_rules(task.policy, config, tools, engine.context)
        return Conversations(engine, tools, task.tool_format, rules, config.max_tool_calling_iterations)
    own: RolloutSource = trainer.round.source(engine)
    return own


def agent_sessions(
    engine: Engine, config: GRPOConfig, agent: Agent, policy: Policy, trainer: Any = None
) -> AgentSessions:
    """Return the source of completions for an agent: each completion is a session.

    Args:
        trainer: its journal records sessions during training.

    Raises:
        ValueError: the chat template writes no conversation, or vLLM lacks the parser.
    """
    tokenizer, arguments = policy.tokenizer, dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]
    form = ChatFormat(tokenizer, arguments, [token for token in policy.end_tokens if token is not None])
    api = ChatAPI(
        tokenizer, os.path.basename(policy.path.rstrip("/")) or "policy", str(tokenizer.chat_template),
        config.agent_tool_parser, config.agent_reasoning_parser, str(policy.model.config.model_type),
    )  # fmt: skip
    settings = AgentSettings(
        config.agent_timeout,
        config.agent_sessions or engine.max_sequences,
        Limits(config.agent_requests, config.agent_parallel),
        refuses=config.agent_sampling == "refuse",
        raises=config.agent_on_error == "raise",
    )

    def log() -> SessionLog | None:
        journal: RolloutStore | None = trainer.journal if trainer is not None and trainer.is_in_train else None
        return journal.sessions if journal is not None else None

    return AgentSessions(engine, agent, api, form, settings, log)


def choose_kernels(
    args: GRPOConfig,
    model: torch.nn.Module,
    second_models: SecondModels,
    closing: ExitStack,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[str]:
    """Put Liger's kernels or compiled layers into the policy and the second models, if set. A collective.

    Yields lines for the user, each before a slow part.
    """
    others = [
        each.model for each in second_models.values() if each.of_policy and unwrap(each.model) is not unwrap(model)
    ]
    if args.use_liger_kernel:
        with on_all_ranks("Liger's kernels"), autocast():
            undo = apply_liger(model, args.device, args.liger_kernel_config, also=others)
        closing.callback(undo)
    if args.torch_compile:
        yield "policy: torch compiles its layers: a minute or more, less the next time"
        for each in (unwrap(model), *others):
            keep_uncompiled(each)
            compile_layers(each, args.torch_compile_backend or "inductor", args.torch_compile_mode)
            closing.callback(forget_compiled, each)
