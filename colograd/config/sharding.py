"""Settings of sharding: how ranks divide weights, gradients, optimizer state and the tokens of a row."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..runtime import process, registry
from .knob import knob

# Tensor parallel sharding: each rank trains the tensors that its vLLM rank samples with. The suffix divides the
# optimizer state (ZeRO-1) or also the gradients (ZeRO-2) among ranks that hold equal tensors.
TENSOR = ("tensor", "tensor+optimizer", "tensor+gradients")
LAUNCHERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")  # Set by accelerate for FSDP and for DeepSpeed.


@dataclass
class ShardingKnobs(TrainingArguments):
    """Settings of sharding."""

    sharding: str = knob(
        "none",
        one_of=("none", "optimizer", "gradients", *TENSOR, "fsdp", "auto"),
        or_path=True,
        note=" in this version",
        extension={**dict.fromkeys(TENSOR, "tensor_parallel"), "fsdp": "fsdp"},
    )
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
        """Set ``sharding`` and its options from accelerate's or DeepSpeed's file. Hide the file from transformers."""
        if self.deepspeed or any(map(os.environ.get, LAUNCHERS)):
            registry.require("launchers", "deepspeed, or accelerate's FSDP or DeepSpeed,")
        # An extension's function (deepspeed) returns requests for a sharding. A request has `sharding`, the method's
        # `name`, `describe()`, and the options below. An option is None if it isn't set.
        requests = [request for read in registry.hooks("launched") for request in read(self.deepspeed)]
        for request in requests:
            if self.sharding not in ("none", "auto", request.sharding):
                raise ValueError(
                    f"sharding is {self.sharding!r}, but {request.name}, which the launcher or deepspeed asks for, is "
                    f"{request.sharding!r}: remove one of them (recipes/accelerate_configs/ddp.yaml sets no sharding)."
                )
            self.sharding = request.sharding
            for name in ("fsdp_reshard_after_forward", "fsdp_offload_params", "offload_optimizer"):
                if (value := getattr(request, name.removeprefix("fsdp_"))) is not None:
                    setattr(self, name, value)
        self.deepspeed: Any = None  # Colograd shards without DeepSpeed's engine.
        self.sharding_note = requests[0].describe() if requests else ""

    def _check_sequences(self) -> None:
        """Raise a ValueError if ranks can't be grouped by ``sequence_parallel_size``; a group shares a row."""
        size = self.sequence_parallel_size
        if size == 1:
            return
        parts = self.vllm_tensor_parallel_size if self.tensor_parallel else 1
        per_node = process.local_world_size()
        for ranks, where in ((self.world_size, "the number of ranks"), (per_node, "the ranks of a machine")):
            if size < 1 or ranks % (size * parts):
                of_parts = f" times vllm_tensor_parallel_size ({parts})" if parts > 1 else ""
                both = math.gcd(self.world_size, per_node)
                able = [str(n) for n in range(1, both + 1) if not both % (n * parts)]
                raise ValueError(
                    f"sequence_parallel_size is {size}, but it{of_parts} must divide {where}, {ranks}: choose one of "
                    f"{', '.join(able)}."
                )

    def resolve_sharding(self, strategy: str) -> None:
        """Replace `sharding: auto` by the chosen ``strategy``, when the policy and the prompts are known."""
        self.sharding: str = strategy

    @property
    def offloads_gradients(self) -> bool:
        """Whether the backward adds gradients to sums in host memory."""
        return self.offload_gradients and self.device.type != "cpu"

    @property
    def cuts_weights(self) -> bool:
        """Whether each rank holds a part of every weight, and each forward and backward gathers the weights (FSDP)."""
        return self.sharding == "fsdp" and self.world_size > 1

    @property
    def tensor_parallel(self) -> bool:
        """Whether the policy is tensor parallel, like vLLM's ranks. Such ranks compute each row together."""
        return self.sharding in TENSOR
