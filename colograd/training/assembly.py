"""The engine built beside the policy, once, before the first step, or the policy alone; and the lines that say what
was built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..data import PromptDataset, PromptStream
from ..engine.absent import NoEngine
from ..engine.sampling import Sampling
from ..engine.vllm_engine import Engine
from ..memory.choice import auto, least_checkpointing, plan_or_raise
from ..memory.description import RunDescription, Workload, describe_run, own_devices
from ..memory.device_turns import DeviceTurns
from ..memory.table import MemoryPlan
from ..parallel.ranks import on_all_ranks
from ..policy.layers import compile_layers, forget_compiled
from ..policy.liger import apply_liger
from ..policy.loading import Policy
from ..policy.lora import unwrap
from ..policy.reference import FrozenCopy, Reference, reference_bytes, reference_of
from ..reporting.metrics import PhaseTimes
from ..rollout.conversations import Conversations
from ..rollout.custom import CustomRollouts
from ..rollout.stages import RolloutSource
from ..rollout.tool_format import ToolFormat
from ..rollout.toolbox import Toolbox
from ..runtime import process
from ..sharding import name_of
from ..weights import (
    Publisher,
    Unpublished,
    bytes_apart,
    check_choice,
    expects_sharing,
    packed_parts,
    publisher,
    serves_packed,
)
from .task import image_reader_of, longest_completion, reset_rules

# Tokens that what `reset` of an environment returns may add to the longest prompt, unless the context is set or ends.
OBSERVATION = 1024
IMAGES_LOOKED_AT = 64  # rows, of which one should have an image
Prompts = PromptDataset | PromptStream


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine beside a policy, or what stands in its place."""

    engine: Engine
    weights: Publisher  # gives the engine the policy's weights
    device_turns: DeviceTurns  # says who has the device's memory when
    memory: MemoryPlan
    reference: Reference | None  # of the KL term; None where `beta` is 0

    def describe(self) -> Iterator[str]:
        """What the user should know of it, in lines."""
        yield self.engine.describe()
        yield self.weights.describe()
        yield from self.memory.table().splitlines()
        yield from self.device_turns.notes
        if self.reference is not None:
            yield self.reference.describe()

    def warnings(self, config: GRPOConfig, policy: Policy, prompts: Sequence[Prompts]) -> Iterator[str]:
        """What the user should look at, in lines."""
        yield from (*config.notes, *config.advice(), *self.engine.warnings(config), *policy.warnings(config))
        for part in prompts:
            if isinstance(part, PromptDataset) and part.num_dropped:
                total = part.num_dropped + len(part)
                yield f"data: {part.num_dropped} of {total} prompts are too long and were dropped"


def assemble(
    config: GRPOConfig,
    policy: Policy,
    prompts: Sequence[Prompts],
    tools: Toolbox | None,
    max_tokens: int,
    times: PhaseTimes,
    closing: ExitStack,
) -> Assembly:
    """Build the engine, and bring the policy to its place beside it. A collective.

    Args:
        prompts: all that the engine will be asked, in training and in evaluation.
        max_tokens: of a micro-batch; 0: still to be measured.
        closing: closes the engine.

    Raises:
        ValueError: no room for the KV cache of one sequence, settings that vLLM refuses, or a way of publishing that
            can't be had.
        RuntimeError: the engine doesn't read a parameter where it should be.
    """
    context = needed_context(config, policy, prompts, tools)
    plan = plan_or_raise(read_run(config, policy, prompts, tools, max_tokens), name_of(config))
    end = policy.tokenizer.eos_token_id
    engine = Engine(
        policy.path,
        config,
        policy.model.dtype,
        context,
        plan.kv_bytes,
        end_tokens=() if end is None else (end,),
        adapter=check_choice(config.weights, policy.adapter, config.cuts_weights),
        sequences=most_sequences(config, prompts),
        blank=policy.quantization is not None and policy.quantization.in_checkpoint,
        parts_of=partial(packed_parts, policy.model) if serves_packed(config, policy) else None,
        images=most_images(prompts, policy, tools, context),
    )
    closing.callback(engine.close)
    with on_all_ranks("the check of the sampling settings"):
        for sampling in (Sampling.for_training(config), Sampling.for_evaluation(config)):
            engine.check(sampling)
    if policy.processor is not None:
        with on_all_ranks("the check of the processor"):
            engine.check_processor(policy.processor)
    with on_all_ranks("the plan of the weights"):
        weights = publisher(
            config.weights,
            policy.model,
            engine,
            untouched=policy.untouched,
            device=config.device,
            adapter=policy.adapter,
            cut=config.cuts_weights,
            seen=next(iter(prompts_with_images(prompts, policy, tools)), None),
        )
    if config.on_cpu:
        process.give_back_freed_memory()  # the policy's former place
    with on_all_ranks("the reference model"):
        reference = reference_of(config, policy)
    apart = plan.policy_weights if config.cuts_weights else bytes_apart(policy.model, engine.model)
    plan = plan.with_engine(engine.weight_bytes, apart, engine.kv_tokens)
    return Assembly(engine, weights, DeviceTurns(engine, config, times), plan, reference)


def assemble_alone(
    config: GRPOConfig,
    policy: Policy,
    prompts: Sequence[Prompts],
    tools: Toolbox | None,
    max_tokens: int,
    times: PhaseTimes,
) -> Assembly:
    """The policy without an engine, in a run that samples nothing; otherwise as `assemble`.

    Raises:
        ValueError: no room for training.
    """
    plan = plan_or_raise(read_run(config, policy, prompts, tools, max_tokens).without_engine(), name_of(config))
    engine = NoEngine(config, policy.model.dtype, needed_context(config, policy, prompts, tools))
    if not config.on_cpu:
        policy.model.to(config.device)
    with on_all_ranks("the reference model"):
        reference = reference_of(config, policy)
    return Assembly(engine, Unpublished(engine), DeviceTurns(engine, config, times), plan, reference)


def settle_by_memory(config: GRPOConfig, policy: Policy, prompts: Sequence[Prompts], tools: Toolbox | None) -> None:
    """Resolve what the memory decides where nothing is said: ``sharding: auto`` is the least sharded way that leaves
    room, ``gradient_checkpointing`` is on for as few layers as this way needs. A collective."""
    if config.sharding == "auto":
        config.settle_sharding(auto(read_run(config, policy, prompts, tools, config.token_budget)))
    if config.gradient_checkpointing is None:
        run = read_run(config, policy, prompts, tools, config.token_budget)
        config.settle_checkpointing(least_checkpointing(run, name_of(config), policy.checkpointing))


def read_run(
    config: GRPOConfig, policy: Policy, prompts: Sequence[Prompts], tools: Toolbox | None, max_tokens: int
) -> RunDescription:
    """The run in numbers, from which its memory follows."""
    work = Workload(
        length=needed_context(config, policy, prompts, tools),
        sequences=sampled_together(config),
        tokens=max_tokens,
        prompt=max(part.longest for part in prompts),
        shares_prompts=not policy.why_padded,
    )
    return describe_run(
        config,
        policy.model,
        own_devices(config.device, policy.model),
        work,
        shared=expects_sharing(config, policy),
        reference=reference_bytes(config, policy),
    )


def prompts_with_images(prompts: Sequence[Prompts], policy: Policy, tools: Toolbox | None) -> list[ModelInput]:
    """A prompt with images, to prove things on; none where there are no images. One is made up where tools may show
    some to a model whose prompts have none, or only rows behind the first ones have any."""
    seen = any(getattr(part, "most_images", 0) for part in prompts)
    if getattr(prompts[0], "most_images", 0):
        found = (prompt.input for prompt in prompts[0].first_ones(IMAGES_LOOKED_AT) if prompt.input.images is not None)
        if (first := next(found, None)) is not None:
            return [first]
    reader = image_reader_of(policy)
    return [reader.made_up()] if reader is not None and (seen or tools is not None) else []


def most_images(prompts: Sequence[Prompts], policy: Policy, tools: Toolbox | None, context: int) -> int:
    """Of what the engine is asked: of a prompt, or with what tools answer as many as have a token in its context."""
    if policy.processor is None:
        return 0
    return context if tools is not None else max(1, *(getattr(part, "most_images", 0) for part in prompts))


def sampled_together(config: GRPOConfig) -> int:
    """Completions of one generation in this rank's engine."""
    return config.per_device_train_batch_size * (config.steps_per_generation or 1)


def most_sequences(config: GRPOConfig, prompts: Sequence[Prompts]) -> int:
    """Completions of this rank's engine in a generation or in an evaluation, whichever has more.

    Args:
        prompts: of training, then of each evaluation.
    """
    engines, each = config.layout.data_size, config.eval_generations()
    evaluated = (-(-len(part) // engines) * each for part in prompts[1:] if isinstance(part, PromptDataset))
    return max(sampled_together(config), *evaluated, 1)


def needed_context(config: GRPOConfig, policy: Policy, prompts: Sequence[Prompts], tools: Toolbox | None) -> int:
    """Tokens that one sequence of the engine may have, prompt and completion together."""
    longest = max(part.longest for part in prompts) + longest_completion(config)
    told = OBSERVATION if tools is not None and tools.has_environments else 0
    return config.vllm_max_model_length or min(longest + told, policy.context)


def rollout_source(
    engine: Engine,
    config: GRPOConfig,
    policy: Policy,
    tools: Toolbox | None,
    form: ToolFormat | None,
    rollout_func: Any,
    trainer: Any,
) -> RolloutSource:
    """Who writes completions: a source or a function of the user's, conversations with tools, or the engine alone.

    Args:
        form: how the policy's chat template writes tool calls, where there are tools.
        rollout_func: a class made with the engine, an object with a method ``generate`` (see `RolloutSource`), or TRL's
            ``f(prompts, trainer)``.
        trainer: is handed to such a function.
    """
    if hasattr(rollout_func, "generate"):
        source: RolloutSource = rollout_func(engine) if isinstance(rollout_func, type) else rollout_func
        return source
    if rollout_func is not None:
        write: Callable[[list[Any]], dict[str, Any]] = lambda prompts: rollout_func(prompts, trainer)  # noqa: E731
        return CustomRollouts(engine, write, policy.end_tokens)
    if tools is not None and form is not None:
        rules = reset_rules(policy, config, tools, engine.context)
        return Conversations(engine, tools, form, rules, config.max_tool_calling_iterations)
    return engine


def choose_kernels(
    args: GRPOConfig,
    model: torch.nn.Module,
    reference: Any,
    closing: ExitStack,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[str]:
    """Put Liger's kernels or compiled layers into the policy and its reference, where they are asked for: a collective.
    Yields lines for people, each before what takes its time."""
    second = reference.model if isinstance(reference, FrozenCopy) else None
    if args.use_liger_kernel:
        with on_all_ranks("Liger's kernels"), autocast():
            undo = apply_liger(model, args.device, args.liger_kernel_config, also=second)
        closing.callback(undo)
    if args.torch_compile:
        yield "policy: torch compiles its layers: a minute or more, less the next time"
        for each in filter(None, (unwrap(model), second)):
            compile_layers(each, args.torch_compile_backend or "inductor", args.torch_compile_mode)
            closing.callback(forget_compiled, each)
