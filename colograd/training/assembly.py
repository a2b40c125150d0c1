"""Before the first step, choose settings that depend on memory, and build the vLLM engine next to the policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from ..batch import ModelInput
from ..config import GRPOConfig
from ..data.columns import size_of
from ..engine.protocol import Engine, EngineUse
from ..engine.sampling import Sampling
from ..engine.vllm_engine import VLLMEngine
from ..memory.choice import auto, least_checkpointing, plan_or_raise
from ..memory.description import RunDescription, Workload, describe_run, own_devices
from ..memory.device_turns import DeviceTurns
from ..memory.shape import CacheNeed, Shape
from ..memory.table import CPU_SHARE, MemoryPlan
from ..parallel.ranks import gather, on_all_ranks
from ..policy.layers import check_compiled, compile_layers, forget_compiled
from ..policy.lora import unwrap
from ..policy.row_proof import choose_rows_where_it_trains
from ..policy.second_models import FrozenModel, SecondModels, second_model_bytes, second_models
from ..policy.supported import check_shared_rows
from ..reporting.metrics import PhaseTimes
from ..runtime import process, registry
from ..sharding import strategy_name
from ..weights import WeightSync, bytes_apart, check_choice, expects_sharing, weight_sync
from .learner import Learner
from .preparation import PreparedRun, Prompts, longest_completion, proof_prompts, without_template


@dataclass(frozen=True, slots=True)
class Assembly:
    """Objects that `assemble` builds. If nothing is sampled, `engine`, `weights` and `device_turns` are None."""

    memory_plan: MemoryPlan
    second_models: SecondModels
    engine: Engine | None = None
    weights: WeightSync | None = None
    device_turns: DeviceTurns | None = None


def assemble(
    config: GRPOConfig, prepared: PreparedRun, max_tokens: int, samples: bool, times: PhaseTimes, closing: ExitStack
) -> Assembly:
    """Build the reference and teacher models, and move the policy to its device. A collective call.

    If the run samples (``samples``), also build the engine and the weight sync.

    Call hooks ``context(config, policy, tokens)``, which check ``tokens``, the maximum length of a sequence."""
    policy, run = prepared.policy, read_run(config, prepared, max_tokens)
    context, end = needed_context(config, prepared), policy.tokenizer.eos_token_id
    with on_all_ranks("the context"):
        for check in registry.hooks("context"):
            check(config, policy, context)
    plan = plan_or_raise(run if samples else run.without_engine(), strategy_name(config))
    if not samples:
        if not config.on_cpu:
            policy.model.to(config.device)
        with on_all_ranks("the second models"):
            return Assembly(plan, second_models(prepared.objective.needs, config, policy))
    use = EngineUse(
        end_tokens=() if end is None else (end,),
        adapter=check_choice(config.weights, policy.adapter, config.cuts_weights),
        sequences=most_sequences(config, prepared.prompts),
        trained=sampled_together(config),
        blank=policy.quantization is not None and policy.quantization.in_checkpoint,
        tokens=size_of(policy.tokenizer),
        policy=policy,
        prompts=prepared.prompts,
        has_tools=prepared.feature.may_add_images,
    )
    engine = VLLMEngine(policy.path, config, policy.model.dtype, context, plan.kv_bytes, use)
    closing.callback(engine.close)
    with on_all_ranks("the check of the sampling settings"):
        for sampling in (Sampling.for_training(config), Sampling.for_evaluation(config)):
            engine.check(sampling)
    with on_all_ranks("the plan of the weights"):
        weights = weight_sync(
            config.weights,
            policy.model,
            engine,
            untouched=policy.untouched,
            device=config.device,
            adapter=policy.adapter,
            cut="rows" if config.cuts_weights else "parts" if config.tensor_parallel else "",
            tower_prompt=next(iter(proof_prompts(prepared.prompts, policy, prepared.feature)), None),
        )
    if config.on_cpu:
        process.give_back_freed_memory()
    with on_all_ranks("the second models"):
        others = second_models(prepared.objective.needs, config, policy)
    apart = plan.policy_weights if config.cuts_weights else bytes_apart(policy.model, engine.tensors)
    plan = plan.with_engine(engine.weight_bytes, apart, engine.kv_tokens)
    return Assembly(plan, others, engine, weights, DeviceTurns(engine, config, times))


def join_second_models(trainer: Any, models: SecondModels) -> None:
    for second in models.values():
        if isinstance(second, FrozenModel) and not (second.offload and trainer.args.cuts_weights):
            trainer.sharding.share_frozen(second.model)
        if callback := second.callback(trainer.model):
            trainer.add_callback(callback)


def announce(trainer: Any, prepared: PreparedRun) -> None:
    config, engine, policy = trainer.args, trainer.engine, trainer.policy
    of_engine = [] if engine is None else [engine.describe(), trainer.weights.describe()]
    lines = of_engine or ["engine: none, as nothing is sampled"]
    lines += [*trainer.memory_plan.table().splitlines(), *(() if engine is None else trainer.device_turns.notes)]
    lines += [second.describe() for second in trainer.learner.second_models.values()]
    lines += [*prepared.scorer.notes, *prepared.feature.notes]
    lines += [*policy.describe(config, trainer.learner.rules.max_tokens), trainer.sharding.describe()]
    for line in filter(None, [*lines, *(note(trainer) for note in registry.hooks("notes"))]):
        trainer.console.say(line)
    warnings = [*config.notes, *config.advice(), *(() if engine is None else engine.warnings(config))]
    warnings += policy.warnings(config)
    warnings += [part.dropped_line() for part in prepared.prompts if getattr(part, "dropped", False)]
    warnings += () if prepared.feature.adds_columns else without_template(prepared.train_prompts, policy)
    for line in warnings:
        trainer.console.warn(line)


def engine_alone(
    config: GRPOConfig, model: str, model_config: Any, end_tokens: tuple[int, ...], length: int, sequences: int,
    closing: ExitStack,
) -> Engine:  # fmt: skip
    """Build a vLLM engine with a checkpoint's weights, without a policy. A collective call."""
    dtype = model_config.dtype if isinstance(model_config.dtype, torch.dtype) else torch.bfloat16
    if (name := dict(config.model_init_kwargs or {}).get("dtype", "auto")) != "auto":  # type: ignore[arg-type]
        dtype = getattr(torch, str(name).removeprefix("torch."))
    kv_bytes = 0  # 0 bytes means that vLLM chooses the size of the KV cache.
    with on_all_ranks("the engine"):
        if config.on_cpu:
            ranks = config.vllm_tensor_parallel_size
            need = CacheNeed.of(
                Shape.of(model_config.get_text_config()).split(ranks), dtype.itemsize, length, min(sequences, 256)
            )
            available = psutil.virtual_memory().available // process.local_world_size()
            kv_bytes = max(need.least, min(need.wanted, available // CPU_SHARE))
    use = EngineUse(end_tokens=end_tokens, sequences=sequences, model_config=model_config)
    engine = VLLMEngine(model, config, dtype, length, kv_bytes, use)
    closing.callback(engine.close)
    engine.stamp(0)
    return engine


def resolve_by_memory(config: GRPOConfig, prepared: PreparedRun, samples: bool = True) -> None:
    """Choose sharding, offloading and gradient checkpointing by available memory. A collective call.

    Values that the user has set stay."""
    if config.sharding == "auto":
        run = read_run(config, prepared, config.token_budget)
        able = run.strategies if samples else run.without_engine().strategies
        config.resolve_sharding(auto(replace(run, strategies=able)))
    if config.offload_optimizer == "auto":
        host = min(gather(psutil.virtual_memory().available // process.local_world_size()))
        moves = dict[str, Any]()
        if not config.on_cpu:
            (cheapest,) = registry.hooks("cheapest")
            moves = cheapest(read_run(config, prepared, config.token_budget), strategy_name(config), host)
        activations = "offloads_activations" in moves and prepared.policy.checkpointing[-1] == 1
        config.resolve_offload("streams" in moves, "offloads_gradients" in moves, activations)
    every = config.checkpointing
    if config.gradient_checkpointing is None:
        run = read_run(config, prepared, config.token_budget)
        every = least_checkpointing(run, strategy_name(config), prepared.policy.checkpointing)
    config.resolve_checkpointing(every)


def read_run(config: GRPOConfig, prepared: PreparedRun, max_tokens: int) -> RunDescription:
    policy = prepared.policy
    work = Workload(
        length=needed_context(config, prepared),
        sequences=sampled_together(config),
        tokens=max_tokens,
        prompt=max(part.longest for part in prepared.prompts),
        shares_prompts=not policy.why_padded,
    )
    others = second_model_bytes(prepared.objective.needs, config, policy)
    return describe_run(
        config,
        policy.model,
        own_devices(config.device, policy.model),
        work,
        shared=expects_sharing(config, policy),
        reference=others.get("reference", 0),
        teacher=others.get("teacher", 0),
    )


def sampled_together(config: GRPOConfig) -> int:
    """Return the maximum number of completions that this rank's vLLM engine samples at one time for training."""
    return config.groups_in_flight * (config.num_generations or 1)


def most_sequences(config: GRPOConfig, prompts: Sequence[Prompts]) -> int:
    """Return the maximum number of completions that this rank's engine samples at one time, also in evaluations."""
    engines, each = config.layout.data_size, config.eval_generations()
    evaluated = (-(-len(part) // engines) * getattr(part, "generations", each) for part in prompts[1:])
    return max(sampled_together(config), *evaluated, 1)


def needed_context(config: GRPOConfig, prepared: PreparedRun) -> int:
    longest = max(part.longest for part in prepared.prompts) + longest_completion(config)
    return config.vllm_max_model_length or min(longest + prepared.feature.reserved_tokens, prepared.policy.context)


def choose_kernels(learner: Learner, closing: ExitStack) -> None:
    """Install fused kernels and compile layers, if configured: in the policy, and in reference and teacher models that
    use the policy's kernels (`SecondModel.of_policy`). A collective.

    Call hooks ``kernels(config)``: each returns None or a function ``install(policy, models)``, which installs kernels
    and returns a function that removes them. Call hooks ``uncompiled(model)`` to exclude layers from compilation."""
    args, model = learner.config, learner.model
    models = (second.model for second in learner.second_models.values() if second.of_policy)
    others = [each for each in models if unwrap(each) is not unwrap(model)]
    for kernels_of in registry.hooks("kernels"):
        if (put := kernels_of(args)) is not None:
            with on_all_ranks("its kernels"), learner.hooks.compute_loss_context_manager():
                undo = put(model, others)
            closing.callback(undo)
    if args.torch_compile:
        learner.events.console.say("policy: torch compiles its layers, which takes up to a minute; less the next time")
        for each in (unwrap(model), *others):
            for keep_uncompiled in registry.hooks("uncompiled"):
                keep_uncompiled(each)
            compile_layers(each, args.torch_compile_backend or "inductor", args.torch_compile_mode)
            closing.callback(forget_compiled, each)


def prove_rows(learner: Learner, prompts: Sequence[ModelInput]) -> None:
    """Check that packed rows give the log-probabilities of transformers' own forward. Otherwise choose padded rows.

    A collective call."""
    args, device, seconds = learner.config, learner.config.device, learner.second_models.values()
    if args.on_cpu and not (args.bf16 or args.torch_compile or args.sequence_parallel_size > 1):
        return  # `prepare` has already checked packed rows with these kernels.
    with learner.hooks.compute_loss_context_manager():
        others = [second.model for second in seconds if second.of_policy]
        why = choose_rows_where_it_trains(learner.model, device, others, prompts)
        for second in seconds:
            if not second.of_policy:
                with second.present() as model:
                    choose_rows_where_it_trains(model, device, asked=prompts)
    check_compiled(args, why)
    check_shared_rows(learner.model, args.sequence_parallel_size, why)
    if why != learner.policy.why_padded:
        learner.policy = replace(learner.policy, why_padded=why)
        learner.rules = replace(learner.rules, share_prompts=not why)
