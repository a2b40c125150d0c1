"""Sharding: what ranks share out among them instead of each holding all of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from .knob import knob, one_of

# Optimizers that update each element by itself: a slice of a parameter is updated as it would be within the whole.
ELEMENTWISE = ("auto", "adamw_split", "adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")

# What `accelerate launch` sets for a configuration whose ranks share one model. transformers takes it without a word.
LAUNCHER_VARIABLES = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}
FSDP_VARIABLE = "ACCELERATE_USE_FSDP"
# Where it is kept that the launcher asked for FSDP: accelerate and transformers must not see it, as they would wrap the
# policy themselves and load it on one rank only.
OWN_FSDP_VARIABLE = "COLOGRAD_LAUNCHED_FSDP"


@dataclass
class ShardingKnobs(TrainingArguments):
    """Sharding."""

    sharding: str = knob(
        "none",
        "What ranks share out: `none` (each rank holds all), `optimizer` (each holds a part of the optimizer's state: "
        "ZeRO-1), `gradients` (and of the gradients, each exchanged as soon as the backward has made it: ZeRO-2) or "
        "`fsdp` (and of the weights, which are gathered block by block: FSDP2; accelerate's FSDP2 files mean the "
        "same). See docs/scaling.md.",
    )
    fsdp_reshard_after_forward: bool = knob(
        True,
        "With `sharding: fsdp`, forget a block's weights after its forward and gather them again for its backward: "
        "without, ranks exchange less and hold the whole policy meanwhile.",
    )
    fsdp_offload_params: bool = knob(
        False,
        "With `sharding: fsdp` on a GPU, keep this rank's part of weights, gradients and optimizer state in host "
        "memory, where the optimizer then runs too. Does nothing on a CPU.",
    )

    def _check_sharding(self) -> None:
        self._take_launched()
        one_of(self, "sharding", ("none", "optimizer", "gradients", "fsdp"), " in this version")
        if self.deepspeed is not None:
            raise ValueError(
                "DeepSpeed isn't available in this version: remove deepspeed and set sharding: gradients, which holds "
                "what ZeRO-2 does, or sharding: fsdp for what ZeRO-3 does."
            )
        if self.fsdp:
            raise ValueError(
                f"fsdp is {self.fsdp!r}, with which accelerate would wrap the policy itself: remove fsdp and "
                "fsdp_config, and set sharding: fsdp."
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
        checkpoints: dict[str, Any] = self.gradient_checkpointing_kwargs or {}
        if self.sharding != "optimizer" and checkpoints.get("use_reentrant"):
            raise ValueError(
                f"sharding is {self.sharding!r} and gradient_checkpointing_kwargs has use_reentrant: true, but then a "
                "gradient may come after its parameter was exchanged: remove use_reentrant (it is false by default)."
            )

    def _take_launched(self) -> None:
        """Take what an FSDP2 file of accelerate's asks for."""
        if os.environ.get(OWN_FSDP_VARIABLE) is None:
            return
        if self.sharding not in ("none", "fsdp"):
            raise ValueError(
                f"sharding is {self.sharding!r}, but accelerate's configuration asks for FSDP: launch with another "
                "`--config_file` (recipes/accelerate_configs/ddp.yaml) or remove sharding."
            )
        self.sharding = "fsdp"
        self.fsdp_reshard_after_forward = _is_on("FSDP_RESHARD_AFTER_FORWARD", default=self.fsdp_reshard_after_forward)
        self.fsdp_offload_params = _is_on("FSDP_OFFLOAD_PARAMS", default=self.fsdp_offload_params)

    @property
    def cuts_weights(self) -> bool:
        """Whether a rank holds a part of the policy's weights only."""
        return self.sharding == "fsdp" and self.world_size > 1


def _is_on(variable: str, default: bool = False) -> bool:
    value = os.environ.get(variable, "").lower()
    return value in ("1", "true", "t", "yes", "y", "on") if value else default


def check_launcher() -> None:
    """Refuse a launcher that asks for sharding that isn't available, and remember one that asks for FSDP2. Called
    first, before transformers acts on the same variables.

    Raises:
        ValueError: naming the variable.
    """
    if _is_on(FSDP_VARIABLE):
        version = os.environ.get("FSDP_VERSION") or "1"
        if version != "2":
            raise ValueError(
                f"FSDP_VERSION is {version}, but only FSDP2 is available: set fsdp_version: 2 in accelerate's "
                "configuration, as recipes/accelerate_configs/fsdp2.yaml has it."
            )
        os.environ[OWN_FSDP_VARIABLE], os.environ[FSDP_VARIABLE] = "1", "false"
    for variable, backend in LAUNCHER_VARIABLES.items():
        if _is_on(variable):
            raise ValueError(
                f"{variable} is set, but {backend} isn't available in this version: launch with `--config_file "
                "recipes/accelerate_configs/ddp.yaml` or `torchrun`, and set sharding: gradients, which holds what "
                "ZeRO-2 does."
            )
