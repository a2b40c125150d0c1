"""The rules of `GRPOConfig`: each violation is one error with the value, the rule and the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..runtime.importing import is_import_path

if TYPE_CHECKING:
    from .grpo import GRPOConfig

LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
# vLLM's sampling parameters that reshape the distribution, and the values at which they don't.
SHAPING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs",
)  # fmt: skip
NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1), "repetition_penalty": (1.0,)}
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
# What `accelerate launch` sets for a configuration whose ranks share one model. transformers takes it without a word.
SHARDING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def _one_of(name: str, value: object, allowed: tuple[str, ...], note: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} {value!r} isn't supported{note}: choose one of {', '.join(allowed)}.")


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least:g}: raise it.")


def check_launcher() -> None:
    """Refuse a launcher that asks for sharding. Called first, before transformers acts on the same variables.

    Raises:
        ValueError: naming the variable.
    """
    for variable, backend in SHARDING.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            raise ValueError(
                f"{variable} is set, but {backend} isn't available in this version (ranks hold full copies): launch "
                "with `--config_file recipes/accelerate_configs/ddp.yaml` or `torchrun`."
            )


def token_budget(given: int | str | None, on_cpu: bool) -> int | str:
    """``max_tokens_per_microbatch``: a number of tokens, or `auto` where a GPU is to be measured.

    Raises:
        ValueError: neither a positive number nor `auto`.
    """
    if given in (None, "auto"):
        return 4096 if on_cpu else "auto"
    try:
        tokens = int(given or 0)
    except ValueError:
        raise ValueError(
            f"max_tokens_per_microbatch is {given!r}, but must be a number of tokens or `auto`: remove it for `auto`."
        ) from None
    _at_least("max_tokens_per_microbatch", tokens, 1)
    return tokens


def best_metric(config: GRPOConfig) -> str | None:
    """``metric_for_best_model``: `reward` where nothing is said, since an evaluation has no loss unless asked for one.

    Raises:
        ValueError: only the direction is said, and it is that of a loss, TRL's default.
    """
    said: str | None = config.metric_for_best_model
    if said is not None or not config.load_best_model_at_end:
        return said
    if config.greater_is_better is False:
        raise ValueError(
            "greater_is_better is false and metric_for_best_model isn't set, but is `reward` then, of which more is "
            "better: say metric_for_best_model, or remove greater_is_better."
        )
    return "reward"


def check_values(config: GRPOConfig) -> None:
    """Check every field that doesn't depend on the batch arithmetic.

    Raises:
        ValueError: the first rule that is broken.
    """
    if config.num_generations is None or config.num_generations < 2:
        raise ValueError(
            f"num_generations is {config.num_generations}, but a group needs at least 2 completions: an advantage "
            "compares completions of the same prompt. Set num_generations to 2 or more (8 is common)."
        )
    for name in (
        "max_completion_length", "num_iterations", "num_generations_eval", "dynamic_sampling_max_rounds",
        "max_tool_calling_iterations",
    ):  # fmt: skip
        _at_least(name, getattr(config, name), 1)
    _at_least("ref_model_sync_steps", config.ref_model_sync_steps, 1)
    for name in ("epsilon", "epsilon_high", "beta", "temperature_eval"):
        _at_least(name, getattr(config, name), 0)
    if config.temperature <= 0:
        raise ValueError(
            f"temperature is {config.temperature}, but completions of a group must differ: set it above 0 (1.0 is "
            "usual). For greedy evaluation use temperature_eval: 0."
        )
    if config.max_completion_length is None:
        raise ValueError("max_completion_length is None, but memory is planned by it: give a number of tokens.")
    if config.log_completions_hub_repo is not None and not config.log_completions:
        raise ValueError(
            f"log_completions_hub_repo is {config.log_completions_hub_repo!r}, but no completions are logged: set "
            "log_completions: true, or remove it."
        )
    if not 0 < config.top_p <= 1:
        raise ValueError(f"top_p is {config.top_p}, but must be in (0, 1]: 1.0 turns it off.")
    _check_advantages(config)
    _one_of("reward_on_error", config.reward_on_error, ("raise", "abstain"))
    _one_of("reward_call", config.reward_call, ("group", "all"))
    _at_least("reward_workers", config.reward_workers, 0)
    _at_least("tool_workers", config.tool_workers, 0)
    for name in ("reward_timeout", "tool_timeout"):
        seconds = getattr(config, name)
        if seconds is not None and not seconds > 0:
            raise ValueError(
                f"{name} is {seconds}, but must be a positive number of seconds: leave it out for no limit."
            )
    _one_of("vllm_importance_sampling_mode", config.vllm_importance_sampling_mode, CORRECTIONS)
    _one_of("importance_sampling_level", config.importance_sampling_level, ("token", "sequence"))
    _one_of("overlong_prompts", config.overlong_prompts, ("drop", "error"))
    _one_of("weights", config.weights, ("auto", "shared", "copied", "adapter"), " in this version")
    _one_of("vllm_model_impl", config.vllm_model_impl, ("auto", "vllm", "transformers"))
    _one_of("vllm_mode", config.vllm_mode, ("colocate",), " (there is no server: each rank has its own engine)")
    check_loss(config)
    check_evaluation(config)
    check_objective(config)
    check_process(config)


def check_loss(config: GRPOConfig) -> None:
    """The rules of the loss's own knobs, and of its entropy terms."""
    if config.loss_type not in LOSSES and not is_import_path(config.loss_type):
        near = difflib.get_close_matches(config.loss_type, LOSSES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"loss_type {config.loss_type!r} isn't one of the built-in ones ({', '.join(LOSSES)}): the nearest is "
            f"{near!r}. For a loss of your own give its import path: package.module:Class."
        )
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}, but must be positive: 1.0 is usual.")
    for name in ("delta", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg", "entropy_coef_delta"):
        _at_least(name, getattr(config, name), 0)
    mode = config.vllm_importance_sampling_mode
    if config.loss_type == "vespo" and config.vllm_importance_sampling_correction and mode.startswith("sequence"):
        raise ValueError(
            f"vllm_importance_sampling_mode is {mode!r}, but loss_type 'vespo' makes the completion's weight of its "
            "tokens' own: set token_truncate or token_mask, or vllm_importance_sampling_correction: false."
        )
    if not 0 <= config.top_entropy_quantile <= 1:
        raise ValueError(
            f"top_entropy_quantile is {config.top_entropy_quantile}, but must be a share from 0 to 1: 1.0 turns it off."
        )
    if config.entropy_coef_min > config.entropy_coef_max:
        raise ValueError(
            f"entropy_coef_min ({config.entropy_coef_min}) must be at most entropy_coef_max "
            f"({config.entropy_coef_max})."
        )


def advice(config: GRPOConfig) -> Iterator[str]:
    """What is taken as in TRL, and rarely is what was meant, or does nothing here."""
    loss, sequence = config.loss_type, config.importance_sampling_level == "sequence"
    if config.torch_empty_cache_steps is not None:
        yield "config: `torch_empty_cache_steps` has no effect: micro-batches are cut to what the device has."
    if sequence and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield (
            f"loss: {loss} sums over tokens, so with importance_sampling_level: sequence a completion weighs by its "
            "length. GSPO is loss_type: grpo."
        )
    if sequence and loss == "vespo":
        yield "loss: vespo has a weight per completion by itself; importance_sampling_level: token is meant for it."
    if not sequence and loss == "luspo":
        yield "loss: luspo is meant for importance_sampling_level: sequence."
    if loss == "cispo" and (config.epsilon_high or 0.0) < 1:
        yield (
            f"loss: cispo bounds the ratio itself by epsilon_high, and {config.epsilon_high} is below 1: the gradient "
            "of every token is scaled down. 5.0 is usual."
        )


def check_evaluation(config: GRPOConfig) -> None:
    """The rules of `evaluate`, and of what is said about its result."""
    if config.temperature_eval == 0 and (config.num_generations_eval or 1) > 1:
        raise ValueError(
            f"num_generations_eval is {config.num_generations_eval}, but with temperature_eval 0 all completions of a "
            "prompt are equal: set it to 1, or raise temperature_eval."
        )
    if str(config.metric_for_best_model or "").removeprefix("eval_") == "loss" and not config.loss_eval:
        raise ValueError(
            f"metric_for_best_model is {config.metric_for_best_model!r}, but `evaluate` computes no loss: use "
            "`reward`, or set loss_eval: true."
        )
    if config.loss_eval and config.temperature_eval not in (None, config.temperature):
        raise ValueError(
            f"temperature_eval is {config.temperature_eval}, but loss_eval compares the sampler's probabilities with "
            f"the trainer's, at temperature {config.temperature}: leave temperature_eval out, or loss_eval."
        )


def _check_advantages(config: GRPOConfig) -> None:
    _one_of("scale_rewards", config.scale_rewards, ("group", "batch", "none"))
    _one_of("multi_objective_aggregation", config.multi_objective_aggregation, AGGREGATIONS)
    _one_of("advantage_baseline", config.advantage_baseline, ("mean", "leave_one_out"))
    if config.multi_objective_aggregation == "normalize_then_sum" and config.advantage_baseline == "leave_one_out":
        raise ValueError(
            "advantage_baseline is 'leave_one_out' and multi_objective_aggregation is 'normalize_then_sum', which "
            "compares with the mean: scaling over the step undoes any other constant. Set one of the two back."
        )


def check_objective(config: GRPOConfig) -> None:
    """The rules of the loss, its reference and its sampler correction."""
    if config.sync_ref_model and config.beta == 0:
        raise ValueError(
            "sync_ref_model is true, but beta is 0, so that there is no reference model: set beta, or remove "
            "sync_ref_model."
        )
    if not 0 < config.ref_model_mixup_alpha <= 1:
        raise ValueError(
            f"ref_model_mixup_alpha is {config.ref_model_mixup_alpha}, but is the policy's share of a mixture, in "
            "(0, 1]: 1 replaces the reference by the policy."
        )
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"vllm_importance_sampling_clip_min ({low}) must be less than vllm_importance_sampling_clip_max ({high})."
        )
    if not config.vllm_importance_sampling_correction:
        return
    if config.vllm_importance_sampling_mode.endswith("truncate") and low is None and high is None:
        raise ValueError(
            f"vllm_importance_sampling_mode {config.vllm_importance_sampling_mode!r} needs a bound: set "
            "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min."
        )
    for name, value in _shaped(config).items():
        raise ValueError(
            f"{name} is {value!r}: the sampler's probabilities are then of another distribution than the trainer's, "
            "and the importance ratio between them is biased. Leave it at its default, or set "
            "vllm_importance_sampling_correction: false."
        )


def _shaped(config: GRPOConfig) -> dict[str, object]:
    """Settings that make the sampler draw from another distribution than the model's at the sampling temperature."""
    given = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    given["vllm_structured_outputs_regex"] = config.vllm_structured_outputs_regex
    extra = config.generation_kwargs if isinstance(config.generation_kwargs, dict) else {}
    given |= {name: extra[name] for name in SHAPING if name in extra}
    return {name: value for name, value in given.items() if value not in NEUTRAL.get(name, (None, 0, [], {}))}


def check_process(config: GRPOConfig) -> None:
    """The rules of ranks, engine and Trainer features."""
    if not config.use_vllm:
        raise ValueError("use_vllm is false, but generation always runs in vLLM in this process: remove the key.")
    if config.fp16:
        raise ValueError("fp16 is true, but policies train in bfloat16 or float32: set dtype instead.")
    if config.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size would cut groups apart: remove it and lower max_tokens_per_microbatch instead."
        )
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if config.world_size != launched:
        raise ValueError(
            f"The launcher started {launched} ranks (WORLD_SIZE), but only {config.world_size} would train together: "
            "start with `torchrun` or `accelerate launch`, and make the GRPOConfig in the process that was "
            "launched."
        )
    tensor_parallel = config.vllm_tensor_parallel_size
    if tensor_parallel < 1 or config.world_size % tensor_parallel:
        raise ValueError(
            f"vllm_tensor_parallel_size is {tensor_parallel}, but must divide the number of ranks "
            f"({config.world_size}): choose one of {', '.join(str(n) for n in divisors(config.world_size))}."
        )
    if tensor_parallel > 1:
        raise ValueError(
            f"vllm_tensor_parallel_size is {tensor_parallel}: engines over several ranks aren't available in this "
            "version. Set it to 1: every rank then has an engine of its own."
        )
    share = config.vllm_gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ValueError(
            f"vllm_gpu_memory_utilization is {share}, but must be in (0, 1]: remove it to have the KV cache planned."
        )
    if config.deepspeed is not None or config.fsdp:
        raise ValueError(
            "DeepSpeed and FSDP aren't available in this version: remove deepspeed/fsdp (ranks hold full copies)."
        )
    if config.parallelism_config is not None:
        raise ValueError(
            "parallelism_config is set, but ranks hold full copies of the policy and train whole sequences: remove it."
        )
    if config.torch_compile:
        raise ValueError(
            "torch_compile is true, but packed rows have other lengths in each micro-batch, for which the policy would "
            "be compiled again and again: remove it (the engine and adamw_split compile what they can by themselves)."
        )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def fold_batch(config: GRPOConfig) -> None:
    """Give the batch fields their final values: see `GRPOConfig`. Idempotent.

    Raises:
        ValueError: a group would not stay whole on one rank, or two fields say different things.
    """
    group = config.num_generations or 1
    ranks = config.world_size
    accumulation = config.gradient_accumulation_steps
    per_rank = config.per_device_train_batch_size * accumulation
    if config.prompts_per_step is not None:
        _check_said_once(config, per_rank, ranks, group)
        if config.prompts_per_step < 1 or config.prompts_per_step % ranks:
            low = max(ranks, config.prompts_per_step // ranks * ranks)
            raise ValueError(
                f"prompts_per_step is {config.prompts_per_step}, but every rank takes the same number of whole "
                f"groups, so it must be a multiple of the {ranks} ranks: {low} or {low + ranks} would do."
            )
        per_rank = config.prompts_per_step // ranks * group
        accumulation = 1
    elif per_rank % group:
        low = per_rank // group * group
        near = " or ".join(str(n) for n in (low, low + group) if n)
        raise ValueError(
            f"per_device_train_batch_size * gradient_accumulation_steps = {config.per_device_train_batch_size} * "
            f"{accumulation} = {per_rank} completions per rank and step, but a group of num_generations = {group} "
            f"stays on one rank: make it a multiple of {group} ({near} would do)."
        )
    config.steps_per_generation = _steps_per_generation(config, accumulation, per_rank)
    config.gradient_accumulation_steps = 1
    config.per_device_train_batch_size = per_rank
    config.prompts_per_step = per_rank // group * ranks
    config.generation_batch_size = None


def _check_said_once(config: GRPOConfig, per_rank: int, ranks: int, group: int) -> None:
    """Refuse TRL's product beside a `prompts_per_step` that contradicts it. At its defaults it says nothing."""
    fields = {f.name: f.default for f in dataclasses.fields(config)}
    factors = ("per_device_train_batch_size", "gradient_accumulation_steps")
    said = [name for name in factors if getattr(config, name) != fields[name]]
    wanted = (config.prompts_per_step or 0) * group
    if said and per_rank * ranks != wanted:
        raise ValueError(
            f"prompts_per_step is {config.prompts_per_step}, which is {wanted} completions per step, but "
            f"per_device_train_batch_size * gradient_accumulation_steps * ranks = {config.per_device_train_batch_size} "
            f"* {config.gradient_accumulation_steps} * {ranks} = {per_rank * ranks}: remove prompts_per_step or "
            f"{' and '.join(said)}."
        )


def _steps_per_generation(config: GRPOConfig, accumulation: int, per_rank: int) -> int:
    """Optimizer steps whose prompts are sampled together, from TRL's two ways of saying it.

    TRL also takes a part of a step, such that one step has several generations: of the same weights, and so sampled
    together here.
    """
    given, whole, rule = config.steps_per_generation, accumulation, f"gradient_accumulation_steps ({accumulation})"
    name, reason = "steps_per_generation", ": a generation feeds whole optimizer steps"
    if config.generation_batch_size is not None:
        if given is not None:
            raise ValueError("generation_batch_size and steps_per_generation say the same thing: give one of them.")
        given, whole = config.generation_batch_size, per_rank * config.world_size
        name, reason = "generation_batch_size", ""
        rule = f"the completions of one optimizer step over all ranks ({whole})"
    if given is None:
        return 1
    if given >= 1 and given % whole == 0:
        return given // whole
    if given >= 1 and whole % given == 0 and config.num_iterations == 1:
        return 1
    divisor = ", or a divisor" if config.num_iterations == 1 else ""
    raise ValueError(f"{name} is {given}, but must be a multiple of {rule}{divisor}{reason}.")


def check_trainer(config: GRPOConfig, **later: Any) -> None:
    """Constructor arguments of TRL that aren't available, and combinations that can't train."""
    for name, value in later.items():
        if value is not None:
            raise ValueError(f"GRPOTrainer's argument {name!r} isn't available in this version: leave it out.")
    if config.n_gpu > 1:
        raise ValueError(
            f"{config.n_gpu} GPUs are visible to one process, but each needs a rank of its own: start with "
            "`accelerate launch` or `torchrun`, or make one visible with CUDA_VISIBLE_DEVICES."
        )
    if config.max_steps > 0 and config.max_steps % config.round_length:
        raise ValueError(
            f"max_steps is {config.max_steps}, but a round is {config.round_length} optimizer steps "
            "(steps_per_generation x num_iterations): make it a multiple, such as "
            f"{-(-config.max_steps // config.round_length) * config.round_length}."
        )
    _check_best(config)


def _check_best(config: GRPOConfig) -> None:
    """Where the best model is to be kept, each evaluation must be where a checkpoint can be: at a round's end."""
    best, length = config.save_strategy == "best", config.round_length
    if length == 1 or not (best or config.load_best_model_at_end):
        return
    reason = "save_strategy is best" if best else "load_best_model_at_end is true"
    strategies = {"eval_steps": config.eval_strategy, "save_steps": config.save_strategy}
    for name in (name for name, strategy in strategies.items() if strategy == "steps"):
        steps = getattr(config, name)
        if steps < 1 or steps % length:
            raise ValueError(
                f"{name} is {steps} and {reason}, but checkpoints fall on the ends of rounds of {length} optimizer "
                f"steps (steps_per_generation x num_iterations), so the best model might not be in one: make {name} a "
                f"multiple of {length}."
            )
