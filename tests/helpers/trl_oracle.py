"""The installed TRL as an oracle: `GRPOTrainer`'s own methods on a trainer that was never constructed.

Inputs of the methods are replaced by tensors. No code of TRL is repeated here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

PAD, END, OTHER = 0, 1, 5


def one_rank() -> SimpleNamespace:
    return SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        sync_gradients=True,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
        pad_across_processes=lambda tensor, dim, pad_index: tensor,
    )


def bare_trainer(**settings: Any) -> Any:
    """Make a `trl.GRPOTrainer` with attributes only. ``settings`` are fields of TRL's configuration."""
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    values = {
        name: field.default
        for name, field in GRPOConfig.__dataclass_fields__.items()
        if name in GRPOConfig.__annotations__
    }
    values |= {"gradient_accumulation_steps": 1, "gradient_checkpointing_kwargs": {}, "use_vllm": True}
    values |= {"steps_per_generation": 1, "per_device_train_batch_size": 1, "pad_to_multiple_of": None} | settings
    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(values)
    trainer.args = SimpleNamespace(**values)
    trainer.accelerator = one_rank()
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.ref_model = SimpleNamespace()
    trainer.epsilon_low = values["epsilon"]
    trainer.epsilon_high = values["epsilon"] if values["epsilon_high"] is None else values["epsilon_high"]
    trainer.current_gradient_accumulation_steps = 1
    trainer.aux_loss_enabled = False
    trainer._entropy_bonus_enabled = values["entropy_coef"] != 0.0 or values["use_adaptive_entropy"]
    trainer._last_world_entropy, trainer._entropy_window_stats = float("inf"), None
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = defaultdict(lambda: defaultdict(list)) | {
        name: [] for name in ("prompt", "completion", "advantages")
    }
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer._tokenizer, trainer.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [END]
    trainer.reward_funcs, trainer.reward_func_names, trainer.reward_weights = [None], ["reward"], torch.ones(1)
    return trainer


def loss_inputs(
    trainer: Any,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    masks: Sequence[Sequence[int]],
    sampler_logprobs: Sequence[Sequence[float | None]],
    old: torch.Tensor,
    reference: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the inputs of the loss, as `_generate_and_score_completions` does.

    Args:
        lengths, truncated, masks, sampler_logprobs: one entry per completion; None: the sampler gave no probability.
        old, reference: (B, T) log-probabilities.
    """
    completions = [[OTHER] * (n - 1) + [OTHER if cut else END] for n, cut in zip(lengths, truncated, strict=True)]
    generated = ([[OTHER]] * len(lengths), completions, masks, [""] * len(lengths), sampler_logprobs, {}, None, [])
    trainer._generate = lambda prompts: generated
    trainer._calculate_rewards = lambda *args: torch.zeros(len(lengths), 1)
    trainer._get_per_token_logps_and_entropies = lambda model, *args, **kwargs: (
        reference if model is trainer.ref_model else old,
        None,
        None,
    )
    return trainer._generate_and_score_completions([{"prompt": ""}] * len(lengths))


def loss_of(trainer: Any, inputs: dict[str, Any], logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Call `_compute_loss` with the policy's (B, T) log-probabilities and entropies."""
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, entropies, None)
    return trainer._compute_loss(trainer.model, inputs)


def metrics_of(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}
