"""Settings of the vLLM engine: memory, ranks per engine, and how the engine gets new weights."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..parallel.layout import RankLayout
from ..runtime import process
from .knob import knob


@dataclass
class EngineKnobs(TrainingArguments):
    """Settings of the vLLM engine."""

    vllm_model_impl: str = knob("auto", one_of=("auto", "vllm", "transformers"))
    """Implementation of the model in vLLM: `vllm` (its own), `transformers`, or `auto`: its own if there is one. TRL's
    default, `vllm`, is an error without one."""
    vllm_max_model_length: int | None = knob(None)
    """The engine's context in tokens; default: the model's, or less if the run needs less."""
    vllm_tensor_parallel_size: int = knob(1)
    """Neighbouring ranks of one machine that share one engine: its weights, KV cache and work. `sharding` says how each
    holds the policy. `per_device_train_batch_size` then counts an engine's completions; TRL's counts a rank's."""
    vllm_gpu_memory_utilization: float | None = knob(
        None, above=0, at_most=1, remedy="remove it to have the KV cache planned"
    )
    """Share of a GPU's memory for the engine: weights, activations, KV cache. Unset, the KV cache is planned: the rest
    of the GPU, up to the need of one generation."""
    vllm_enable_sleep_mode: bool = knob(False)
    """On a GPU, free the KV cache while the policy trains. The engine's weights stay; TRL moves or discards them. No
    effect on a CPU."""
    offload_optimizer: str = knob(
        "none", one_of=("none", "sampling", "stream", "auto"), spellings={"true": "sampling", "false": "none"},
        extension="offload",
    )  # fmt: skip
    """On a GPU, keep the optimizer's state in page-locked host memory while the engine samples (`sampling`, or `true`),
    or always (`stream`, with `optim: adamw_split`): it passes through the GPU in pieces, to the same bits. `auto`: if
    training doesn't fit, as few as needed of this, `offload_gradients` and `gradient_checkpointing: offload`. No effect
    on a CPU."""
    vllm_engine_kwargs: dict[str, Any] | str | None = knob(None)
    """Other arguments of `vllm.LLM`, such as `max_num_seqs` (default on a GPU: the completions of a generation, at most
    1,024), `enforce_eager`, `kv_cache_memory_bytes` or `dtype` (default: the policy's)."""
    weights: str = knob(
        "auto", one_of=("auto", "shared", "copied", "adapter", "gathered"), or_path=True, note=" in this version"
    )
    """How the engine gets new weights: `shared` (the policy's parameters are views of the engine's), `copied`,
    `adapter` (only a LoRA's tensors), `gathered` (rows of all ranks, for `sharding: fsdp`), `auto` (the first that
    works), or the import path of a class of your own; see docs/design.md."""

    @property
    def streams_optimizer(self) -> bool:
        """Whether the optimizer's state stays in host memory and passes through the GPU in pieces."""
        return self.offload_optimizer == "stream" and not (self.on_cpu or self.fsdp_offload_params)

    @property
    def layout(self) -> RankLayout:
        return RankLayout(
            self.process_index, self.world_size, self.vllm_tensor_parallel_size, process.local_world_size(),
            self.sequence_parallel_size, self.vllm_tensor_parallel_size if self.tensor_parallel else 1,
        )  # fmt: skip

    def _check_ranks(self) -> None:
        launched = int(os.environ.get("WORLD_SIZE") or 1)
        if self.world_size != launched:
            raise ValueError(
                f"{launched} ranks were launched (WORLD_SIZE), but only {self.world_size} would train together: make "
                "the GRPOConfig in a process that `torchrun` or `accelerate launch` started, or unset WORLD_SIZE."
            )
        per_engine, per_node = self.vllm_tensor_parallel_size, process.local_world_size()
        together = f"must divide the ranks per machine ({per_node}, LOCAL_WORLD_SIZE), as an engine is on one machine"
        rules = {f"must divide the number of ranks ({self.world_size})": self.world_size, together: per_node}
        for rule, ranks in rules.items():
            if per_engine < 1 or ranks % per_engine:
                both = math.gcd(self.world_size, per_node)
                divisors = [str(n) for n in range(1, both + 1) if both % n == 0]
                raise ValueError(
                    f"vllm_tensor_parallel_size is {per_engine}, but {rule}: choose one of {', '.join(divisors)}."
                )
