"""Settings of sharding: how ranks divide weights, gradients, optimizer state and the tokens of a row."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..runtime import registry
from .knob import knob

# With these strategies each rank trains the tensors that its vLLM rank samples with.
# The suffix names the state that ranks with equal tensors divide among them.
TENSOR = ("tensor", "tensor+optimizer", "tensor+gradients")
# Name of a strategy -> its extension. The names that the core knows are here for the error if the folder is missing.
OFFERED = {"fsdp": "fsdp"} | dict.fromkeys(TENSOR, "tensor_parallel") | registry.names("sharding")
LAUNCHERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


@dataclass
class ShardingKnobs(TrainingArguments):
    """Settings of sharding."""

    sharding: str = knob(
        "none", one_of=("none", "optimizer", "gradients", *OFFERED, "auto"), or_path=True, note=" in this version",
        extension=OFFERED,
    )  # fmt: skip
    """What is divided among ranks: `none`, `optimizer` (optimizer state, ZeRO-1), `gradients` (gradients too, ZeRO-2),
    `tensor` (with `vllm_tensor_parallel_size`: each rank trains the tensors that its engine's rank samples with;
    `tensor+optimizer` and `tensor+gradients` divide the rest among engines), `fsdp` (weights too, FSDP2), or `auto`:
    the first that leaves room for the planned KV cache. Accelerate and DeepSpeed files select the same. Or the
    import path of your own `ShardingStrategy`, package.module:Class. See docs/guide/several-gpus.md."""
    fsdp_reshard_after_forward: bool = knob(True, extension="fsdp")
    """With `sharding: fsdp`, free a block's weights after its forward and gather them again for its backward. `false`:
    fewer exchanges, the whole policy in memory."""
    fsdp_offload_params: bool = knob(False, extension="fsdp")
    """With `sharding: fsdp` on a GPU, keep this rank's weights, gradients and optimizer state in host memory; the
    optimizer runs there. No effect on a CPU."""
    offload_gradients: bool = knob(False, extension="offload")
    """On a GPU, add each gradient to float32 sums in page-locked host memory during the backward and free it. The
    optimizer (`adamw_split`) reads the sums there, to the same bits. No effect on a CPU."""
    sequence_parallel_size: int = knob(1, extension="sequence_parallel")
    """Neighbouring ranks of one machine that divide the tokens of each row; in attention each has all tokens for a part
    of the heads. A rank's activations are divided by it. Each rank samples for itself. Works with `sharding: none`,
    `optimizer`, `gradients` and the three of `tensor`; see docs/guide/several-gpus.md."""

    def _take_sharding(self) -> None:
        """Set `sharding` from the configuration of accelerate or DeepSpeed. Then set `deepspeed` to None, because
        transformers would start DeepSpeed otherwise."""
        if self.deepspeed or any(map(os.environ.get, LAUNCHERS)):
            registry.require("launchers", "deepspeed, or accelerate's FSDP or DeepSpeed,")
        self.sharding_note = ""
        for read in registry.hooks("launched"):
            settings, self.sharding_note = read(self)
            for name, value in settings.items():
                setattr(self, name, value)
        self.deepspeed: Any = None

    def resolve_sharding(self, strategy: str) -> None:
        self.sharding: str = strategy

    @property
    def offloads_gradients(self) -> bool:
        return self.offload_gradients and self.device.type != "cpu"

    @property
    def cuts_weights(self) -> bool:
        """Whether each rank holds a part of the weights, and gathers each layer's weights to compute (FSDP)."""
        return self.sharding == "fsdp" and self.world_size > 1

    @property
    def tensor_parallel(self) -> bool:
        """Whether an engine's ranks split the policy's tensors as vLLM does, and compute each row together."""
        return self.sharding in TENSOR
