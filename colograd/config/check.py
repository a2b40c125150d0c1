"""What `GRPOTrainer` says of a configuration before it starts: an error, or a line of advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .grpo import GRPOConfig


def check_trainer(config: GRPOConfig, **later: Any) -> None:
    """Refuse what a configuration may hold and a trainer can't do.

    Args:
        later: TRL's constructor arguments that aren't available in this version.

    Raises:
        ValueError: the first rule that is broken.
    """
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
    """Where the best model is kept, evaluations and checkpoints must fall on the ends of rounds."""
    best, length = config.save_strategy == "best", config.round_length
    if length == 1 or not (best or config.load_best_model_at_end):
        return
    reason = "save_strategy is best" if best else "load_best_model_at_end is true"
    for name, strategy in (("eval_steps", config.eval_strategy), ("save_steps", config.save_strategy)):
        steps = getattr(config, name)
        if strategy == "steps" and (steps < 1 or steps % length):
            raise ValueError(
                f"{name} is {steps} and {reason}, but checkpoints fall on the ends of rounds of {length} optimizer "
                f"steps (steps_per_generation x num_iterations), so the best model might not be in one: make {name} a "
                f"multiple of {length}."
            )


def advice(config: GRPOConfig) -> Iterator[str]:
    """A line for each setting that is taken as in TRL, but does nothing here or rarely does what was meant."""
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
