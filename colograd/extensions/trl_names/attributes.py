"""TRL's attributes of a trainer, for users' scripts and callbacks that read them."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from ...policy.second_models import FrozenModel
from ...rewards.functions import ModelReward

# Attributes of TRL's trainer that are fields of the same name in `GRPOConfig`.
OF_ARGUMENTS = (
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "loss_type", "delta", "scale_rewards", "importance_sampling_level",
    "off_policy_mask_threshold", "multi_objective_aggregation", "mask_truncated_completions", "top_entropy_quantile",
    "use_adaptive_entropy", "num_iterations", "beta", "epsilon_high", "shuffle_dataset", "log_completions",
    "log_unique_prompts", "log_multimodal", "num_completions_to_print",
)  # fmt: skip
# Attributes that a rollout source may provide, with their values in runs without the source.
OF_SOURCES: dict[str, Any] = {"tools": [], "environments": None, "environment_factories": None, "rollout_func": None}
ENGINE = "the engine is `trainer.engine` here, and samples for `generate` (docs/guide/tools.md, Rollouts of your own)"
LOOP = "reward functions and tools share the process's event loop, which no trainer has"
ABSENT = {
    **dict.fromkeys(("vllm_generation", "vllm_client", "llm", "generation_config"), ENGINE),
    **dict.fromkeys(("async_loop", "async_loop_thread", "async_loop_ready_event"), LOOP),
    "commit_scheduler": "the completions log (`trainer.completion_log`) sends its files by itself",
}

# Public attributes that differ from TRL's in type or value. The text says how an attribute differs.
DIFFERENT = {
    "args": "Colograd's `GRPOConfig`, which has TRL's fields and more",
    "compute_loss_func": "None; TRL's is a text by which transformers before 5.19 leaves the loss unscaled",
    "data_collator": "`list`; nothing is collated",
    "optimizer_cls_and_kwargs": "a class and its arguments where `optim: auto` picks `adamw_split`; None in TRL",
    "vllm_gpu_memory_utilization": "None where it isn't set: the KV cache is planned",
    "generation_kwargs": "Only the configuration's; TRL's without vLLM have every sampling setting",
}

# Methods of TRL's and transformers' trainers that Colograd never calls -> method or methods to override instead.
GENERATE, SCORE, ADVANTAGES, LOSS = "generate", "score", "compute_advantages", "compute_loss"
EVALUATE, DATA = "evaluate", "get_train_dataloader"
HOOKS = {
    **dict.fromkeys(("_generate_and_score_completions", "_prepare_inputs"), f"{GENERATE}, {SCORE} and {ADVANTAGES}"),
    **dict.fromkeys(("_generate", "_generate_single_turn", "_tokenize_prompts", "_tool_call_loop"), GENERATE),
    "_calculate_rewards": SCORE,
    **dict.fromkeys(("_compute_loss", "_get_per_token_logps_and_entropies"), LOSS),
    **dict.fromkeys(("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"), LOSS),
    **dict.fromkeys(("get_batch_samples", "_run_epoch", "_get_train_sampler"), DATA),
    **dict.fromkeys(("_get_eval_sampler", "get_eval_dataloader", "evaluation_loop", "prediction_step"), EVALUATE),
}


class TRLNames:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, stage in HOOKS.items():
            if getattr(cls, name, None) not in (None, getattr(Trainer, name, None)):
                raise TypeError(
                    f"{cls.__name__} defines {name}, which nothing calls here: override {stage} (docs/architecture.md)."
                )
        replaced = any(LOSS in vars(base) for base in cls.__mro__ if not issubclass(Trainer, base))
        parameters = inspect.signature(getattr(cls, LOSS)).parameters if replaced else {}
        if wrong := [name for name in ("return_outputs", "num_items_in_batch") if name in parameters]:
            raise ValueError(
                f"{cls.__name__} defines compute_loss({', '.join(parameters)}) with transformers' arguments. This "
                f"trainer passes one micro-batch, but no {' and no '.join(wrong)}. Write `def compute_loss(self, "
                "model, micro_batch, **kwargs)`, call `output = super().compute_loss(model, micro_batch)` for a "
                "LossOutput, and return `dataclasses.replace(output, loss=...)` (docs/losses.md)."
            )

    if not TYPE_CHECKING:  # hidden from type checkers, which know the real attributes

        def __getattr__(self, name: str) -> Any:
            if name in ATTRIBUTES:
                return ATTRIBUTES[name](self)
            hint = f": {ABSENT[name]}" if name in ABSENT else ""
            if name in HOOKS:
                hint = f": nothing calls it here; override {HOOKS[name]} (docs/architecture.md, Replacing a stage)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name in ATTRIBUTES:
                raise AttributeError(
                    f"{name} can't be set to {value!r} on a trainer, where it is read-only: pass the value to "
                    "GRPOConfig or GRPOTrainer, or override a stage (docs/architecture.md, Replacing a stage)."
                )
            super().__setattr__(name, value)


def _end_tokens(trainer: Any) -> list[int]:
    named = getattr(trainer.model.generation_config, "eos_token_id", None)
    named = [] if named is None else [named] if isinstance(named, int) else list(named)
    own = trainer.policy.tokenizer.eos_token_id
    return named if own in named else [own, *named]


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    **{name: operator.attrgetter(f"args.{name}") for name in OF_ARGUMENTS},
    **dict.fromkeys(("chat_template", "continuous_batching_config", "pad_to_multiple_of"), lambda trainer: None),
    "use_transformers_continuous_batching": lambda trainer: False,
    # None in a run with an adapter, where the reference is the policy with other weights.
    "ref_model": lambda trainer: (
        reference.model
        if isinstance(reference := trainer.learner.second_models.get("ref_logprobs"), FrozenModel)
        else None
    ),
    "num_generations_eval": lambda trainer: trainer.args.eval_generations(),
    "max_tool_calling_iterations": lambda trainer: trainer.args.max_tool_calling_iterations or sys.maxsize,
    "chat_template_kwargs": lambda trainer: trainer.args.chat_template_kwargs or {},
    "generation_kwargs": lambda trainer: trainer.args.generation_kwargs or {},
    "eos_token_ids": _end_tokens,
    "epsilon_low": lambda trainer: trainer.args.epsilon,
    "router_aux_loss_coef": lambda trainer: trainer.policy.router_coef(trainer.args),
    "aux_loss_enabled": lambda trainer: trainer.policy.router_coef(trainer.args) != 0,
    "entropy_coef": lambda trainer: trainer.learner.entropy.coefficient,
    "reward_funcs": lambda trainer: [reward.function for reward in trainer.rewards],
    "reward_func_names": lambda trainer: [reward.name for reward in trainer.rewards],
    "reward_weights": lambda trainer: torch.tensor(trainer.estimator.weights, dtype=torch.float32),
    "reward_processing_classes": lambda trainer: [
        reward.function.tokenizer if isinstance(reward.function, ModelReward) else None for reward in trainer.rewards
    ],
    **{
        name: functools.partial(lambda n, d, trainer: trainer.feature.trl_attributes.get(n, lambda: d)(), name, default)
        for name, default in OF_SOURCES.items()
    },
}
