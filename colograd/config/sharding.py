"""Sharding: what ranks share out among them instead of each holding all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from .knob import knob, one_of
from .launched import from_deepspeed, launched, take_launcher

# Optimizers that update each element by itself: a slice of a parameter is updated as it would be within the whole.
ELEMENTWISE = ("auto", "adamw_split", "adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")


@dataclass
class ShardingKnobs(TrainingArguments):
    """Sharding."""

    sharding: str = knob(
        "none",
        "What ranks share out: `none` (each rank holds all), `optimizer` (each holds a part of the optimizer's state: "
        "ZeRO-1), `gradients` (and of the gradients, each exchanged as soon as the backward has made it: ZeRO-2) or "
        "`fsdp` (and of the weights, which are gathered block by block: FSDP2); `auto`: the first of these that leaves "
        "room for the planned KV cache and micro-batch. accelerate's files for FSDP2 and DeepSpeed, and `deepspeed`, "
        "mean the way that does the same. See docs/scaling.md.",
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

    def _take_sharding(self) -> None:
        """Take what a launcher's file or ``deepspeed`` asks for, before transformers acts on it. Idempotent.

        Raises:
            ValueError: two of them say different things.
        """
        take_launcher()
        given = (launched(), from_deepspeed(self.deepspeed) if self.deepspeed else None)
        asked = [found for found in given if found is not None and found.way != "none"]
        for found in asked:
            if self.sharding not in ("none", "auto", found.way):
                raise ValueError(
                    f"sharding is {self.sharding!r}, but {found.name}, which the launcher or deepspeed asks for, is "
                    f"{found.way!r}: remove one of them (recipes/accelerate_configs/ddp.yaml asks for nothing)."
                )
            self.sharding = found.way
            for name in ("fsdp_reshard_after_forward", "fsdp_offload_params", "offload_optimizer"):
                if (value := getattr(found, name.removeprefix("fsdp_"))) is not None:
                    setattr(self, name, value)
        self.deepspeed: Any = None  # DeepSpeed itself doesn't run
        self.sharding_note = asked[0].describe() if asked else ""

    def _check_sharding(self) -> None:
        one_of(self, "sharding", ("none", "optimizer", "gradients", "fsdp", "auto"), " in this version")
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

    def resolve_sharding(self, way: str) -> None:
        """Resolve ``auto``, once the policy and the prompts are known."""
        self.sharding: str = way

    @property
    def cuts_weights(self) -> bool:
        """Whether a rank holds a part of the policy's weights only."""
        return self.sharding == "fsdp" and self.world_size > 1
