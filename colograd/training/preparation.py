"""Check a `GRPOTrainer`'s arguments, load the policy and tokenise prompts, before the vLLM engine is built."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from ..batch import ModelInput
from ..config import GRPOConfig
from ..data import PromptDataset, PromptRules, StepOrder, tokenize_prompts
from ..data.columns import EMPTY, IMAGES, check_columns, columns_of
from ..engine.arguments import check_parts
from ..engine.building import check_vllm
from ..engine.sampling import check_sampling
from ..losses.objective import Objective
from ..memory.device_turns import expand_segments
from ..parallel import watchdog
from ..parallel.layout import Place, check_engines, check_places
from ..parallel.ranks import gather, on_all_ranks
from ..policy.layers import check_compiled
from ..policy.loading import Policy, load_policy, proven_on
from ..policy.supported import check_supported
from ..reporting.console import Console
from ..rewards import Scorer, resolve_rewards
from ..rewards.calling import check_columns_for
from ..rewards.functions import as_list
from ..rollout.features import SourceFeature, TrainerArguments, source_feature
from ..runtime import process, registry
from ..sharding import check_sharding
from ..weights import check_choice

Prompts = Any  # A `PromptDataset`, or an extension's object with some members of `PromptDataset`.
NO_FEATURE = SourceFeature()


@dataclass(frozen=True, slots=True)
class PreparedRun:
    policy: Policy
    train_prompts: Prompts
    eval_prompts: Any  # A `PromptDataset`, a benchmark (with its own `evaluate`), a dict of these two, or None.
    proof_prompts: list[ModelInput]  # Prompts with images and the like, to check packed rows.
    scorer: Scorer
    feature: SourceFeature
    objective: Objective

    @property
    def prompts(self) -> list[Prompts]:
        parts = self.eval_prompts.values() if isinstance(self.eval_prompts, dict) else [self.eval_prompts]
        return [self.train_prompts, *(part for part in parts if part is not None)]


def prepare(given: TrainerArguments, args: GRPOConfig, closing: ExitStack) -> PreparedRun:
    """Check the arguments, load the policy, tokenise the prompts. A collective call.

    Call extensions' hooks: ``trainer_arguments(arguments, config)`` may change the config, ``without_rewards(config)``
    returns whether the run needs no reward function, ``loaded_policy(policy, config, samples)`` returns the policy."""
    watchdog.set_limit(args.rank_timeout)
    expand_segments(args)
    places = gather(Place.here(args.device))
    with on_all_ranks("the start"):
        check_places(places)
        check_engines(args.layout, places)
        # First the checks that need no loaded model.
        args.check_for_trainer()
        for take in registry.hooks("trainer_arguments"):
            take(given, args)
        check_supported(given.model, args, given.peft_config, given.has_images)
        if given.samples:
            check_vllm()
            check_sampling(args)
        check_sharding(args, given.optimizer)
        objective = Objective.from_config(args)
        feature = source_feature(given, args)
        closing.callback(feature.close)
        functions, weights = given.reward_funcs, args.reward_weights
        for with_models in registry.hooks("reward_models"):
            functions = with_models(functions, given.reward_processing_classes, args)
        functions = as_list(functions)
        if weights is None or len(weights) == len(functions):  # a wrong number of weights is refused below
            weights = None if weights is None else [*weights, *[1.0] * len(feature.rewards)]
            functions = [*functions, *feature.rewards]
        needs_none = not (functions or weights) and any(allows(args) for allows in registry.hooks("without_rewards"))
        rewards = [] if needs_none else resolve_rewards(functions, weights)
        scorer = Scorer(rewards, args.reward_workers, args.reward_timeout, args.reward_on_error, on_gpu=not args.on_cpu)
        closing.callback(scorer.close)
        watchdog.progress("loading the model")
        policy = load_policy(given.model, given.processing_class, args, given.peft_config, given.has_images)
        for check in registry.hooks("loaded_policy"):
            policy = check(policy, args, given.samples)
        check_choice(args.weights, policy.adapter, args.cuts_weights)
        check_parts(policy.model.config, args.vllm_tensor_parallel_size, args.world_size)
        objective = objective.with_terms(args, policy)
        check_compiled(args, policy.why_padded)
        args.resolve_precision(policy.model.dtype)
        feature.check_policy(policy, args)
        train_prompts = train_prompts_of(given.train_dataset, policy, args, feature)
        eval_prompts = eval_prompts_of(given.eval_dataset, policy, args, feature)
        proofs = proof_prompts([train_prompts], policy, feature)
        policy = proven_on(policy, proofs) if args.on_cpu else policy
        for check in registry.hooks("evaluation_check"):
            check(args, rewards, eval_prompts, given.adds_metrics or feature.adds_metrics)
        needs_columns = not (feature.adds_columns or given.replaced & {"generate", "score"})
        if needs_columns and isinstance(train_prompts, PromptDataset):  # A streamed dataset may not know its columns.
            check_columns_for(rewards, columns_of(train_prompts.dataset))
    return PreparedRun(policy, train_prompts, eval_prompts, proofs, scorer, feature, objective)


def prepared_config(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    if args is not None and not isinstance(args, GRPOConfig):
        kind = type(args)
        raise ValueError(
            f"`args` is a {kind.__module__.partition('.')[0]}.{kind.__name__}, but must be Colograd's own GRPOConfig: "
            "import it with `from colograd import GRPOConfig`."
        )
    if args is None:
        loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = str(model) if isinstance(model, str | os.PathLike) else loaded_from
        args = GRPOConfig(output_dir=f"{os.path.basename(name.rstrip('/')) or type(model).__name__}-GRPO")
    process.quiet_logs(args.verbose)
    if args.on_cpu:
        process.keep_freed_memory()
    return args


def longest_completion(args: GRPOConfig) -> int:
    return max(args.max_completion_length or 0, args.max_completion_length_eval or 0)


def train_prompts_of(
    dataset: Any, policy: Policy, args: GRPOConfig, feature: SourceFeature = NO_FEATURE, context: int | None = None
) -> Prompts:
    """Tokenise the training dataset, unless a hook ``prompts(dataset, rules, config)`` returns its prompts.

    Then call the hooks ``train_prompts(prompts, config)``, which check the prompts or change them in place."""
    rules = prompt_rules(policy, args, "train", context, feature)
    rows = wanted_columns(feature.empty_prompts(args) if dataset is None else dataset, policy, args, feature, "train")
    if isinstance(rows, IterableDataset):
        registry.require("streams", "an IterableDataset as `train_dataset`")
    prompts = next(filter(None, (make(rows, rules, args) for make in registry.hooks("prompts"))), None)
    if prompts is None:
        prompts = tokenize_prompts(rows, rules)
        StepOrder.of(args, len(prompts))
    for check in registry.hooks("train_prompts"):
        check(prompts, args)
    return prompts


def eval_prompts_of(
    dataset: Any, policy: Policy, args: GRPOConfig, feature: SourceFeature = NO_FEATURE, context: int | None = None
) -> Any:
    """Tokenise the prompts of an evaluation. A dict of datasets becomes a dict of prompts, None stays None.

    Hooks ``benchmark(dataset, policy, config, context)`` may replace benchmarks' names by objects with `evaluate` and
    `dropped_line`. ``context``: maximum tokens of a sequence in the vLLM engine, or None before the engine exists."""
    for replace in registry.hooks("benchmark"):
        dataset = replace(dataset, policy, args, context)

    def prompts_of(part: Any, name: str) -> Any:
        if part is None or hasattr(part, "dropped_line"):
            return part
        rows = wanted_columns(part, policy, args, feature, name)
        return tokenize_prompts(rows, prompt_rules(policy, args, name, context, feature))

    if isinstance(dataset, dict):
        return {name: prompts_of(part, name) for name, part in dataset.items()}
    return prompts_of(dataset, "eval")


def wanted_columns(dataset: Any, policy: Policy, args: GRPOConfig, feature: SourceFeature, name: str) -> Any:
    """Apply `remove_unused_columns` to a dataset, and keep the columns that hooks ``prompt_columns(config)`` return.

    If the column ``prompt`` is missing and the rollout source writes the prompts, add empty prompts, and keep all
    columns."""
    names = columns_of(dataset) if isinstance(dataset, Dataset | IterableDataset) else ()
    if feature.writes_prompts and names and "prompt" not in names:
        return dataset.map(lambda row: {"prompt": EMPTY})
    if args.remove_unused_columns and "prompt" in names:
        check_columns(dataset, name, policy.processor is not None)
        used = [*IMAGES, *feature.columns, *(each for hook in registry.hooks("prompt_columns") for each in hook(args))]
        return dataset.select_columns(["prompt", *(column for column in used if column in names)])
    return dataset


def prompt_rules(
    policy: Policy, args: GRPOConfig, name: str, context: int | None, feature: SourceFeature = NO_FEATURE
) -> PromptRules:
    completion, most = longest_completion(args), engine_context(policy, args, context)
    limit = min(args.max_prompt_tokens or most, most - completion)
    if limit < 1:
        raise ValueError(
            f"The larger of `max_completion_length` and `max_completion_length_eval` is {completion}, but the context "
            f"has {most} tokens and must hold a prompt, too: lower the larger one, or raise `vllm_max_model_length` if "
            "the model's context is longer."
        )
    return PromptRules(
        policy.tokenizer,
        max_prompt_tokens=limit,
        overlong=args.overlong_prompts,
        chat_template_kwargs=dict(args.chat_template_kwargs or {}),  # type: ignore[arg-type]
        name=name,
        columns=feature.columns,
        arguments=feature.template_arguments,
        reader=reader_of(policy),
        tell=Console(args.layout.is_main, bars=False).say,
        rows=policy.rows,
    )


def engine_context(policy: Policy, args: GRPOConfig, context: int | None) -> int:
    return min(policy.context, args.vllm_max_model_length or policy.context, context or policy.context)


def without_template(prompts: Prompts, policy: Policy) -> Iterator[str]:
    row = prompts[0] if isinstance(prompts, PromptDataset) else prompts.first(1)[0].example
    prompt, tokenizer = row["prompt"], policy.tokenizer
    if not isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
        return
    if not any(token in prompt for token in tokenizer.all_special_tokens):
        yield (
            f"data: the prompts are plain text, so the chat template of {policy.path or 'the model'} isn't applied: "
            "if it is a chat model, give lists of messages, or set system_prompt"
        )


def reader_of(policy: Policy) -> Any:
    """Return the first object that hooks ``prompt_reader(policy)`` make to read a dataset's images, or None."""
    return next(filter(None, (make(policy) for make in registry.hooks("prompt_reader"))), None)


def proof_prompts(prompts: Sequence[Prompts], policy: Policy, feature: SourceFeature) -> list[ModelInput]:
    """Return prompts with content other than text, such as images, to test the policy's forward."""
    return [each for make in registry.hooks("proof_prompts") for each in make(prompts, policy, feature)]
