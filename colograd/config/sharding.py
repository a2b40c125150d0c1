"""Sharding: what ranks share out among them instead of each holding all of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from transformers import TrainingArguments

from .knob import knob, one_of

# Optimizers that update each element by itself: a slice of a parameter is updated as it would be within the whole.
ELEMENTWISE = ("auto", "adamw_split", "adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")

# What `accelerate launch` sets for a configuration whose ranks share one model. transformers takes it without a word.
LAUNCHER_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


@dataclass
class ShardingKnobs(TrainingArguments):
    """Sharding."""

    sharding: str = knob(
        "none",
        "What ranks share out: `none` (each rank holds all), `optimizer` (each holds a part of the optimizer's state: "
        "ZeRO-1) or `gradients` (and of the gradients, each exchanged as soon as the backward has made it: ZeRO-2). "
        "See docs/scaling.md.",
    )

    def _check_sharding(self) -> None:
        one_of(self, "sharding", ("none", "optimizer", "gradients"), " in this version")
        if self.deepspeed is not None or self.fsdp:
            raise ValueError(
                "DeepSpeed and FSDP aren't available in this version: remove deepspeed/fsdp and set sharding: "
                "gradients, which holds what ZeRO-2 does."
            )
        if self.parallelism_config is not None:
            raise ValueError(
                "parallelism_config is set, but ranks hold full copies of the policy and train whole sequences: remove "
                "it."
            )
        if self.sharding == "none":
            return
        if self.optim not in ELEMENTWISE:
            raise ValueError(
                f"sharding is {self.sharding!r} and optim is {self.optim!r}, but a rank updates slices of parameters, "
                f"which that optimizer can't: choose one of {', '.join(ELEMENTWISE)}, or set sharding: none."
            )
        if self.sharding == "gradients" and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "sharding is 'gradients' and gradient_checkpointing_kwargs has use_reentrant: true, but then a "
                "gradient may come after its parameter was exchanged: remove use_reentrant (it is false by default)."
            )


def check_launcher() -> None:
    """Refuse a launcher that asks for sharding. Called first, before transformers acts on the same variables.

    Raises:
        ValueError: naming the variable.
    """
    for variable, backend in LAUNCHER_VARIABLES.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            raise ValueError(
                f"{variable} is set, but {backend} isn't available in this version: launch with `--config_file "
                "recipes/accelerate_configs/ddp.yaml` or `torchrun`, and set sharding: gradients, which holds what "
                "ZeRO-2 does."
            )
