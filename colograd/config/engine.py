"""The engine: its memory, its share of the ranks, and its weight updates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..parallel.layout import RankLayout
from ..runtime import process
from ..runtime.importing import is_import_path
from .knob import knob, one_of

# Settings that a policy in the engine's layout can't have.
NOT_IN_PARTS = (
    "torch_compile", "use_liger_kernel", "sync_ref_model", "router_replay", "teacher_model_name_or_path",
    "offload_gradients",
)  # fmt: skip


def offload_way(given: str | bool) -> str:
    """Return `offload_optimizer` without its short forms, which are texts on a command line."""
    asked = str(given).lower()
    return {"true": "sampling", "false": "none"}.get(asked, asked)


@dataclass
class EngineKnobs(TrainingArguments):
    """The engine."""

    vllm_model_impl: str = knob(
        "auto",
        "`vllm`: its own implementation of the model; `transformers`: that of transformers, in vLLM; `auto`: its own "
        "where it has one (TRL's default, `vllm`, is an error where it has none).",
    )
    vllm_max_model_length: int | None = knob(
        None, "The engine's context in tokens; default: the model's, or what is needed if less."
    )
    vllm_tensor_parallel_size: int = knob(
        1,
        "Ranks that share one engine, which splits its weights, its KV cache and its work among them: neighbours on "
        "one machine. Each holds the policy beside it as `sharding` says, and trains a part of what its engine "
        "sampled. A step's prompts are shared out to engines, so `per_device_train_batch_size` counts an engine's "
        "completions (TRL's, a rank's).",
    )
    vllm_gpu_memory_utilization: float | None = knob(
        None,
        "Share of a GPU's memory for the engine: its weights, its activations and the KV cache. Unset, the KV cache is "
        "planned: what policy, gradients, optimizer and a micro-batch leave, up to what one generation can use (TRL "
        "takes 0.3 of the GPU, whatever the model).",
    )
    vllm_enable_sleep_mode: bool = knob(
        False,
        "On a GPU, give the KV cache's memory back while the policy trains. The engine's weights stay (TRL moves or "
        "discards them too). Does nothing on a CPU.",
    )
    offload_optimizer: str = knob(
        "none",
        "On a GPU, keep the optimizer's state in page-locked host memory while the engine samples (`sampling`, or "
        "`true`), or always (`stream`, with `optim: adamw_split`): it passes through the GPU piece by piece while the "
        "optimizer steps, to the same bits. `auto`: where training doesn't fit, that, `offload_gradients` and "
        "`gradient_checkpointing: offload`, as few of them as the plan needs. Does nothing on a CPU.",
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = knob(
        None,
        "Anything else for `vllm.LLM`, such as `max_num_seqs` (default on a GPU: the completions of a generation or an "
        "evaluation, at most 1,024, and as many for its CUDA graphs), `enforce_eager`, `kv_cache_memory_bytes` or "
        "`dtype` (default: the policy's).",
    )
    weights: str = knob(
        "auto",
        "How the engine gets new weights: `shared` (the policy's parameters are views of the engine's), `copied` (one "
        "pass over the bytes), `adapter` (LoRA: the adapter's tensors only), `gathered` (a few rows of each rank at a "
        "time, of a policy that `sharding: fsdp` has cut), `auto` (shared where that can be had; adapter for LoRA "
        "where vLLM serves it, else copied and merged on the way; gathered where the policy is cut), or the import "
        "path of a class of your own; see docs/design.md.",
    )

    @property
    def streams_optimizer(self) -> bool:
        """Whether the optimizer's state passes through the GPU from the host (with `fsdp_offload_params` it is updated
        there)."""
        return self.offload_optimizer == "stream" and not (self.on_cpu or self.fsdp_offload_params)

    @property
    def why_not_between_steps(self) -> str:
        """The reason why nothing is trained between the steps of a rank's own engine (`overlap`), as far as settings
        show; empty: it is allowed."""
        asked: Any = self  # a field of another group
        if self.on_cpu:
            return "on a CPU decoding takes all of the rank's cores"
        if self.vllm_enable_sleep_mode:
            return "with vllm_enable_sleep_mode the KV cache and a micro-batch's activations take turns in memory"
        if self.vllm_tensor_parallel_size > 1:
            return "the ranks of an engine step together, and would wait for the one that trains"
        if asked.router_replay:
            return "with router_replay the experts of a completion may still be on the engine's stream"
        if asked.reward_call == "all":
            return "with reward_call: all no group is scored before the last is sampled"
        return ""

    @property
    def checks_drafts(self) -> bool:
        """Whether the engine decodes speculatively."""
        kwargs: Any = self.vllm_engine_kwargs or {}
        return "speculative_config" in dict(kwargs)

    @property
    def layout(self) -> RankLayout:
        """This rank's place among all ranks."""
        return RankLayout(
            self.process_index, self.world_size, self.vllm_tensor_parallel_size, process.local_world_size(),
            self.sequence_parallel_size, self.vllm_tensor_parallel_size if self.tensor_parallel else 1,
        )  # fmt: skip

    def _check_engine(self) -> None:
        one_of(self, "vllm_model_impl", ("auto", "vllm", "transformers"))
        if not is_import_path(str(self.weights)):
            one_of(self, "weights", ("auto", "shared", "copied", "adapter", "gathered"), " in this version")
        share = self.vllm_gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(
                f"vllm_gpu_memory_utilization is {share}, but must be in (0, 1]: remove it to have the KV cache "
                "planned."
            )
        self.offload_optimizer = offload_way(self.offload_optimizer)
        one_of(self, "offload_optimizer", ("none", "sampling", "stream", "auto"))
        self._check_drafts()
        self._check_ranks()

    def _check_drafts(self) -> None:
        """Check the settings that exclude speculative decoding."""
        if not self.checks_drafts:
            return
        asked: Any = self  # fields of other groups
        reasons = {
            "router_replay is true, and experts of dropped drafts would be told": asked.router_replay,
            "min_p is set, which vLLM leaves out where it drafts": asked.min_p,
            "generation_kwargs has min_tokens, for which vLLM doesn't count the drafts before a place": "min_tokens"
            in dict(asked.generation_kwargs or {}),
            "vllm_tensor_parallel_size is above 1": self.vllm_tensor_parallel_size > 1,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ValueError(f"speculative_config in vllm_engine_kwargs can't be had, as {reason}: remove one of them.")

    def _check_ranks(self) -> None:
        """Check that the started ranks have found each other, and that engines divide them."""
        launched = int(os.environ.get("WORLD_SIZE") or 1)
        if self.world_size != launched:
            raise ValueError(
                f"The launcher started {launched} ranks (WORLD_SIZE), but only {self.world_size} would train together: "
                "start with `torchrun` or `accelerate launch`, and make the GRPOConfig in the process that was "
                "launched."
            )
        per_engine, per_node = self.vllm_tensor_parallel_size, process.local_world_size()
        if per_engine < 1 or self.world_size % per_engine:
            divisors = [str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ValueError(
                f"vllm_tensor_parallel_size is {per_engine}, but must divide the number of ranks "
                f"({self.world_size}): choose one of {', '.join(divisors)}."
            )
        if per_node % per_engine:
            divisors = [str(n) for n in range(1, per_node + 1) if per_node % n == 0 and self.world_size % n == 0]
            raise ValueError(
                f"vllm_tensor_parallel_size is {per_engine}, but the ranks of an engine must be on one machine, and "
                f"each has {per_node} of them (LOCAL_WORLD_SIZE): choose one of {', '.join(divisors)}."
            )
        if self.tensor_parallel:
            self._check_tensor_parallel()
        elif per_engine > 1 and self.weights not in ("auto", "copied"):
            raise ValueError(
                f"weights is {self.weights!r}, but an engine over {per_engine} ranks holds parts of the weights, into "
                "which those of the policy are copied: set weights: auto, or vllm_tensor_parallel_size: 1."
            )

    def _check_tensor_parallel(self) -> None:
        """Check the settings that a policy in the engine's layout requires."""
        if self.vllm_tensor_parallel_size == 1:
            raise ValueError(
                f"sharding is {self.sharding!r} and vllm_tensor_parallel_size is 1, but the policy is cut as the ranks "
                "of an engine cut it: set vllm_tensor_parallel_size to 2 or more, or sharding to none, optimizer or "
                "gradients."
            )
        if self.weights not in ("auto", "shared", "adapter"):
            raise ValueError(
                f"sharding is {self.sharding!r} and weights is {self.weights!r}, but a policy in the engine's layout "
                "is the engine's weights: set weights: auto."
            )
        if self.vllm_model_impl == "transformers":
            raise ValueError(
                f"sharding is {self.sharding!r} and vllm_model_impl is 'transformers', but how vLLM cuts a model of "
                "transformers' isn't known: set vllm_model_impl: auto."
            )
        kwargs: Any = self.vllm_engine_kwargs or {}
        given = kwargs.get("dtype")
        if given is not None and str(given).removeprefix("torch.") != self.policy_dtype:
            raise ValueError(
                f"sharding is {self.sharding!r} and vllm_engine_kwargs sets dtype {given!r}, but the engine's tensors "
                f"are the policy's, whose dtype is {self.policy_dtype}: remove it."
            )
        if asked := [name for name in NOT_IN_PARTS if getattr(self, name)]:
            raise ValueError(
                f"sharding is {self.sharding!r} and {asked[0]} is {getattr(self, asked[0])}, which isn't available for "
                f"a policy in the engine's layout in this version: remove {asked[0]}, or set sharding: gradients."
            )
