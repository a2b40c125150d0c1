"""Check the arguments of a `GRPOTrainer`, load the policy and tokenise prompts, before the vLLM engine is built."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..batch import ModelInput
from ..config import GRPOConfig
from ..data import PromptDataset
from ..data.columns import columns_of
from ..engine.arguments import check_split
from ..engine.building import check_vllm
from ..engine.sampling import check_sampling
from ..losses.objective import Objective
from ..memory.device_turns import expand_segments
from ..parallel import watchdog
from ..parallel.layout import Place, check_engines, check_places
from ..parallel.ranks import gather, on_all_ranks
from ..policy.layers import check_compiled
from ..policy.loading import Policy, load_policy, proven_on
from ..policy.outline import note_on_cpu
from ..policy.supported import check_supported
from ..reporting.console import Console
from ..rewards import Scorer, resolve_rewards
from ..rewards.calling import check_columns_for
from ..rewards.functions import as_list
from ..rollout.features import SourceFeature, TrainerArguments, source_feature
from ..runtime import process, registry
from ..sharding import check_sharding
from ..weights import check_choice
from .prompts import Prompts, eval_prompts_of, proof_prompts, train_prompts_of


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The objects that a run needs before its vLLM engine is built: policy, prompts, rewards and loss."""

    policy: Policy
    train_prompts: Prompts
    eval_prompts: Any  # A PromptDataset, a dict of PromptDatasets, or None.
    proof_prompts: list[ModelInput]  # Prompts with images or audio, for the checks of packed rows and copied weights.
    scorer: Scorer
    feature: SourceFeature
    objective: Objective

    @property
    def prompts(self) -> list[Prompts]:
        """The prompts of training, followed by the prompts of each evaluation."""
        parts = self.eval_prompts.values() if isinstance(self.eval_prompts, dict) else [self.eval_prompts]
        return [self.train_prompts, *(part for part in parts if part is not None)]


def prepare(given: TrainerArguments, args: GRPOConfig, closing: ExitStack) -> PreparedRun:
    """Check the arguments, load the policy, tokenise the prompts. A collective call: bad input on one rank raises a
    ValueError on all ranks. An extension's hook ``loaded_policy`` checks or replaces the policy: (policy, config,
    whether the run samples) -> policy."""
    watchdog.set_limit(args.rank_timeout)
    expand_segments(args)
    places = gather(Place.here(args.device))
    with on_all_ranks("the start"):
        check_places(places)
        check_engines(args.layout, places)
        # Check all settings that need only the configuration and the model's name before the model is loaded.
        args.check_for_trainer()
        if given.quantization_config is not None:
            registry.require("quantized", "quantization_config")
            for take in registry.hooks("quantization_config"):
                take(args, given.model, given.quantization_config)
        check_supported(given.model, args, given.peft_config, given.has_images)
        if args.layout.is_main and (note := note_on_cpu(given.model, args)):
            Console(enabled=True, bars=False).warn(note)
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
        if weights is None or len(weights) == len(functions):  # otherwise `resolve_rewards` raises an error
            weights = None if weights is None else [*weights, *[1.0] * len(feature.rewards)]
            functions = [*functions, *feature.rewards]
        # An extension's hook ``without_rewards`` (config -> bool) may allow a run without reward functions.
        needs_none = not (functions or weights) and any(allows(args) for allows in registry.hooks("without_rewards"))
        rewards = [] if needs_none else resolve_rewards(functions, weights)
        scorer = Scorer(rewards, args.reward_workers, args.reward_timeout, args.reward_on_error, on_gpu=not args.on_cpu)
        scorer.environments = feature.lender
        closing.callback(scorer.close)
        watchdog.progress("loading the model")
        policy = load_policy(given.model, given.processing_class, args, given.peft_config, given.has_images)
        for check in registry.hooks("loaded_policy"):
            policy = check(policy, args, given.samples)
        check_choice(args.weights, policy.adapter, args.cuts_weights)
        check_split(args, policy.model.config)
        objective = objective.with_terms(args, policy)
        check_compiled(args, policy.why_padded)
        args.resolve_precision(policy.model.dtype)
        feature.check_policy(policy, args)
        train_prompts = train_prompts_of(given.train_dataset, policy, args, feature)
        eval_prompts = eval_prompts_of(given.eval_dataset, policy, args, feature)
        proofs = proof_prompts([train_prompts], policy, feature)
        policy = proven_on(policy, proofs) if args.on_cpu else policy
        for check in registry.hooks("evaluation_check"):  # arguments: config, rewards, prompts, adds_metrics
            check(args, rewards, eval_prompts, given.adds_metrics or feature.adds_metrics)
        needs_columns = not (feature.adds_columns or given.replaced & {"generate", "score"})
        if needs_columns and isinstance(train_prompts, PromptDataset):  # streamed datasets are checked later
            check_columns_for(rewards, columns_of(train_prompts.dataset))
    return PreparedRun(policy, train_prompts, eval_prompts, proofs, scorer, feature, objective)


def prepared_config(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    """Apply the configuration's settings of logs and memory. If ``args`` is None, make a default `GRPOConfig`."""
    if args is not None and not isinstance(args, GRPOConfig):
        kind = type(args)
        raise ValueError(
            f"args is a {kind.__module__.partition('.')[0]}.{kind.__name__}, but must be Colograd's own GRPOConfig, "
            "which has more fields than TRL's: from colograd import GRPOConfig."
        )
    if args is None:
        loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = str(model) if isinstance(model, str | os.PathLike) else loaded_from
        args = GRPOConfig(output_dir=f"{os.path.basename(name.rstrip('/')) or type(model).__name__}-GRPO")
    process.quiet_logs(args.verbose)
    if args.on_cpu:
        process.keep_freed_memory()
    return args
