"""What a trainer builds once, before the first step: the engine beside the policy, and who writes with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..batch import Group, Prompt
from ..config import GRPOConfig
from ..config.check import advice
from ..data import PromptDataset, PromptStream
from ..engine.sampling import Sampling
from ..engine.vllm_engine import Engine
from ..memory import plan as memory
from ..memory.plan import MemoryPlan
from ..memory.residency import Residency
from ..parallel.ranks import together
from ..policy.loading import Policy
from ..policy.packing import PackingRules
from ..policy.reference import Reference, reference_bytes, reference_of
from ..reporting.console import Console
from ..reporting.metrics import PhaseTimes
from ..rollout.conversations import Conversations
from ..rollout.custom import CustomRollouts
from ..rollout.tool_format import ToolFormat
from ..rollout.toolbox import Toolbox
from ..runtime import process
from ..weights import Publisher, bytes_apart, check_choice, expects_sharing, publisher
from .task import longest_completion, reset_rules

# Tokens that what `reset` of an environment returns may add to the longest prompt, unless the context is set or ends.
OBSERVATION = 1024


@dataclass(frozen=True, slots=True)
class Sampler:
    """The engine, how it gets weights, and who has the device's memory when."""

    engine: Engine
    weights: Publisher
    residency: Residency
    memory: MemoryPlan
    reference: Reference | None
    writer: Writer


class Writer(Protocol):
    """Writes the groups of some prompts: the engine itself, conversations with tools, or a function of the user's."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]: ...


class Starting(Protocol):
    """What of a trainer is there before its engine."""

    policy: Policy
    model: Any  # the policy's, as the trainer holds it; its parameters may move into the engine's
    args: Any
    train_prompts: PromptDataset | PromptStream
    eval_prompts: Any
    rules: PackingRules
    times: PhaseTimes
    console: Console
    tools: Toolbox | None


def build_sampler(trainer: Starting, notes: Sequence[str], form: ToolFormat | None, rollout_func: Any) -> Sampler:
    """Build the engine beside the policy, and say what the user should know of both. A collective.

    Args:
        notes: further lines to say.
        form: how the policy's chat template writes tool calls, where there are tools.
        rollout_func: the user's, if any.
    """
    started = time.perf_counter()
    policy, model, rules, tools = trainer.policy, trainer.model, trainer.rules, trainer.tools
    args: GRPOConfig = trainer.args
    evaluated = trainer.eval_prompts.values() if isinstance(trainer.eval_prompts, dict) else [trainer.eval_prompts]
    prompts = [trainer.train_prompts, *(part for part in evaluated if part is not None)]
    longest = max(part.longest for part in prompts) + longest_completion(args)
    told = OBSERVATION if tools is not None and tools.has_environments else 0
    context = args.vllm_max_model_length or min(longest + told, policy.context)
    sequences = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    end = policy.tokenizer.eos_token_id
    shared, held = expects_sharing(args, policy), reference_bytes(args, policy)
    plan = memory.plan(args, model, context, sequences, rules.max_tokens, shared=shared, reference=held)
    engine = Engine(
        policy.path,
        args,
        policy.model.dtype,
        context,
        plan.kv_bytes,
        end_tokens=() if end is None else (end,),
        adapter=check_choice(args.weights, policy.adapter),
    )
    with together("the check of the sampling settings"):
        for sampling in (Sampling.for_training(args), Sampling.for_evaluation(args)):
            engine.check(sampling)
    with together("the plan of the weights"):
        weights = publisher(
            args.weights,
            model,
            engine,
            untouched=policy.untouched,
            device=args.device,
            adapter=policy.adapter,
        )
    if args.on_cpu:
        process.give_back_freed_memory()  # the policy's former place
    with together("the reference model"):
        reference = reference_of(args, policy)
    residency = Residency(engine, args, trainer.times)
    plan = plan.with_engine(engine.weight_bytes, bytes_apart(model, engine.model), engine.kv_tokens)
    lines = [*args.notes, *advice(args), engine.describe(), weights.describe()]
    lines += [*plan.table().splitlines(), *residency.notes, *notes]
    lines += tools.notes if tools else []
    lines += policy.describe(args, rules.max_tokens)
    lines += [reference.describe()] if reference else []
    lines += [
        f"data: {part.num_dropped} of {part.num_dropped + len(part)} prompts are too long and were dropped"
        for part in prompts
        if isinstance(part, PromptDataset) and part.num_dropped
    ]
    for line in (*lines, f"ready in {time.perf_counter() - started:.0f} s"):
        trainer.console.say(line)
    return Sampler(engine, weights, residency, plan, reference, _writer(engine, trainer, form, rollout_func))


def _writer(engine: Engine, trainer: Starting, form: ToolFormat | None, rollout_func: Any) -> Writer:
    """Who writes completions: a function of the user's, conversations with tools, or the engine alone."""
    if rollout_func is not None:
        return CustomRollouts(engine, rollout_func, trainer)
    if trainer.tools is not None and form is not None:
        rules = reset_rules(trainer.policy, trainer.args, trainer.tools, engine.context)
        return Conversations(engine, trainer.tools, form, rules, trainer.args.max_tool_calling_iterations)
    return engine
