"""What a trainer builds once, before the first step: tokenised prompts, and the engine beside the policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import IterableDataset

from . import memory, process
from .config import GRPOConfig
from .data import PromptDataset, PromptLoader, PromptRules, PromptStream, StepOrder, StreamLoader, tokenize_prompts
from .engine import Engine
from .memory import MemoryPlan
from .metrics import PhaseTimes
from .packing import PackingRules
from .policy import Policy
from .progress import Console
from .ranks import together
from .reference import Reference, reference_bytes, reference_of
from .residency import Residency
from .weights import Publisher, bytes_apart, check_choice, expects_sharing, publisher


def longest_completion(args: GRPOConfig) -> int:
    """Tokens a completion may have, in training or evaluation."""
    return max(args.max_completion_length or 0, args.max_completion_length_eval or 0)


def train_prompts_of(dataset: Any, policy: Policy, args: GRPOConfig) -> PromptDataset | PromptStream:
    """The prompts to train on, such that a completion has room behind each: tokenised, or to be while they are read.

    Raises:
        ValueError: no dataset, no room for a prompt, prompts that don't fill a round, or what tokenising finds.
    """
    rules = _rules(policy, args, "train", None)
    if dataset is None:
        raise ValueError("train_dataset is missing: give a datasets.Dataset with a column `prompt`.")
    if isinstance(dataset, IterableDataset):
        return PromptStream(_wanted(dataset, args), rules, args)
    prompts = tokenize_prompts(_wanted(dataset, args), rules)
    StepOrder.of(args, len(prompts))
    return prompts


def loader_of(prompts: PromptDataset | PromptStream, args: GRPOConfig) -> PromptLoader | StreamLoader:
    """One item is the list of prompts of one optimizer step on this rank."""
    if isinstance(prompts, PromptStream):
        return StreamLoader(prompts)
    return PromptLoader(prompts, StepOrder.of(args, len(prompts)))


def _wanted(dataset: Any, args: GRPOConfig) -> Any:
    """The dataset without what ``remove_unused_columns`` takes from the reward functions."""
    if args.remove_unused_columns and "prompt" in (getattr(dataset, "column_names", None) or ()):
        return dataset.select_columns(["prompt"])
    return dataset


def _rules(policy: Policy, args: GRPOConfig, name: str, context: int | None) -> PromptRules:
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
    )


def eval_prompts_of(dataset: Any, policy: Policy, args: GRPOConfig, context: int | None = None) -> Any:
    """Likewise for evaluation: of one dataset, of a dict of them, or None for none. Tokenised ones stay as they are.

    Iterable ones are read to their end: evaluation takes every prompt once.
    """
    if dataset is None or isinstance(dataset, PromptDataset):
        return dataset
    if isinstance(dataset, dict):
        given: dict[str, Any] = dataset
        return {
            name: tokenize_prompts(_wanted(part, args), _rules(policy, args, name, context))
            for name, part in given.items()
        }
    return tokenize_prompts(_wanted(dataset, args), _rules(policy, args, "eval", context))


@dataclass(frozen=True, slots=True)
class Sampler:
    """The engine, how it gets weights, and who has the device's memory when."""

    engine: Engine
    weights: Publisher
    residency: Residency
    memory: MemoryPlan
    reference: Reference | None


def build_sampler(
    policy: Policy,
    model: Any,
    args: GRPOConfig,
    prompts: Sequence[PromptDataset | PromptStream],
    rules: PackingRules,
    times: PhaseTimes,
    console: Console,
    notes: Sequence[str],
) -> Sampler:
    """Build the engine beside the policy, and say what the user should know of both. A collective.

    Args:
        policy, model: the policy, and its model as the trainer holds it; its parameters may move into the engine's.
        prompts: all that will be sampled from, for the engine's context.
        notes: further lines to say.
    """
    started = time.perf_counter()
    context = args.vllm_max_model_length or max(part.longest for part in prompts) + longest_completion(args)
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
    residency = Residency(engine, args, times)
    plan = plan.with_engine(engine.weight_bytes, bytes_apart(model, engine.model), engine.kv_tokens)
    lines = [*args.notes, engine.describe(), weights.describe(), *plan.table().splitlines(), *residency.notes, *notes]
    lines += policy.describe(args, rules.max_tokens)
    lines += [reference.describe()] if reference else []
    lines += [
        f"data: {part.num_dropped} of {part.num_dropped + len(part)} prompts are too long and were dropped"
        for part in prompts
        if isinstance(part, PromptDataset) and part.num_dropped
    ]
    for line in (*lines, f"ready in {time.perf_counter() - started:.0f} s"):
        console.say(line)
    return Sampler(engine, weights, residency, plan, reference)
