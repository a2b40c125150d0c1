"""TRL's names on the trainer: its attributes under the names that scripts and callbacks read, and its hooks, which a
subclass may have replaced, refused with what takes their place.

Nothing else in the package uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Trainer

from ..policy.reference import FrozenCopy
from ..rewards.models import RewardModel

# Attributes of TRL's trainer that are fields of its configuration.
OF_ARGUMENTS = (
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "chat_template_kwargs", "use_vllm", "vllm_mode", "loss_type", "scale_rewards", "importance_sampling_level",
    "multi_objective_aggregation", "mask_truncated_completions", "top_entropy_quantile", "entropy_coef",
    "num_iterations", "beta", "epsilon_high", "shuffle_dataset", "max_tool_calling_iterations",
)  # fmt: skip
ENGINE = "vLLM is trainer.engine here, and samples for `generate` (see docs/tools.md for a function of your own)"
SUCCESSORS = {"vllm_generation": ENGINE, "vllm_client": ENGINE, "llm": ENGINE}

# Methods of TRL's trainer, and of transformers' below it, that nothing calls here, with the stage that does their work.
GENERATE, SCORE, ADVANTAGES, LOSS = "generate", "score", "compute_advantages", "compute_loss"
EVALUATE, DATA = "evaluate", "get_train_dataloader"
HOOKS = {
    "_generate_and_score_completions": f"{GENERATE}, {SCORE} and {ADVANTAGES}",
    "_prepare_inputs": f"{GENERATE}, {SCORE} and {ADVANTAGES}",
    "_generate": GENERATE,
    "_generate_single_turn": GENERATE,
    "_tokenize_prompts": GENERATE,
    "_tool_call_loop": GENERATE,
    "_calculate_rewards": SCORE,
    "_compute_loss": LOSS,
    "_get_per_token_logps_and_entropies": LOSS,
    "get_high_entropy_mask": LOSS,
    "get_off_policy_mask": LOSS,
    "get_gamma_weights": LOSS,
    "_get_train_sampler": DATA,
    "_get_eval_sampler": EVALUATE,
    "get_eval_dataloader": EVALUATE,
    "evaluation_loop": EVALUATE,
    "prediction_step": EVALUATE,
}


class TRLNames:
    """What TRL's users may ask of a trainer, beside what `transformers.Trainer` has."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass that replaces what nothing calls: it would train on as if nothing had been said.

        Raises:
            TypeError: naming the method and the stage to override.
        """
        super().__init_subclass__(**kwargs)
        for name, stage in HOOKS.items():
            if getattr(cls, name, None) not in (None, getattr(Trainer, name, None)):
                raise TypeError(
                    f"{cls.__name__} defines {name}, which nothing calls here: override {stage} (docs/architecture.md, "
                    "Replacing a stage)."
                )

    if not TYPE_CHECKING:  # types know what there is

        def __getattr__(self, name: str) -> Any:
            """TRL's name for what is there under another one."""
            if name in OF_ARGUMENTS:
                return getattr(self.args, name)
            if name in _FOUND:
                return _FOUND[name](self)
            hint = f": {SUCCESSORS[name]}" if name in SUCCESSORS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


_FOUND = {
    # As in TRL, an adapter's reference is no second model.
    "ref_model": lambda trainer: trainer.reference.model if isinstance(trainer.reference, FrozenCopy) else None,
    "num_generations_eval": lambda trainer: trainer.args.eval_generations(),
    "epsilon_low": lambda trainer: trainer.args.epsilon,
    "reward_funcs": lambda trainer: [reward.function for reward in trainer.rewards],
    "reward_func_names": lambda trainer: [reward.name for reward in trainer.rewards],
    "reward_weights": lambda trainer: trainer.estimator.weights,
    "reward_processing_classes": lambda trainer: [
        reward.function.tokenizer if isinstance(reward.function, RewardModel) else None for reward in trainer.rewards
    ],
}
