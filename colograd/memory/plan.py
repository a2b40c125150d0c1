"""The memory plan of this rank, before anything is built: read from the model, the configuration and the device.

Everything but the KV cache follows from the model and the configuration; the cache gets what is left, up to what one
generation can use.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch

from ..config import GRPOConfig
from ..engine.arguments import MOST_SEQUENCES, engine_dtype, share_is_given
from ..parallel.ranks import gather, world_size
from ..policy.lora import is_adapted
from ..runtime import process
from .choice import AVAILABLE, WHOLE, Run
from .shape import Lengths, Shape
from .tower import Tower
from .ways import PolicySizes


def read(
    config: GRPOConfig,
    model: Any,
    length: int,
    sequences: int,
    tokens: int,
    shared: bool,
    reference: int = 0,
    prompt: int = 0,
    packed: bool = True,
    served: bool = False,
) -> Run:
    """The run in numbers, the same on every rank: a collective. `choice.auto` picks a way of sharding by it.

    Args:
        model: the policy with its frozen parameters marked as such, or its outline (`policy.outline`) before it is
            loaded.
        length: tokens of the longest sequence that the engine takes.
        sequences: completions of one generation in this rank's engine.
        tokens: the budget of a micro-batch; 0: still to be measured.
        shared: whether the policy's parameters are views of the engine's tensors.
        reference: bytes that the reference of the KL term will hold.
        prompt: tokens of the longest prompt; 0: what a completion leaves of ``length``.
        packed: whether a group's completions share their prompt in a row.
        served: whether the engine reads the policy's quantised weights.
    """
    given: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    on_gpu = config.device.type == "cuda"
    dtype = model.dtype
    in_place = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
    name, total, available = device_memory(config.device, in_place)
    of_engine = engine_dtype(config, dtype).itemsize
    eight_bit = str(given.get("kv_cache_dtype") or "").startswith("fp8")
    completion = min(config.max_completion_length or length, length)
    group = (config.num_generations or 1) if packed else 1
    return Run(
        device=name,
        on_gpu=on_gpu,
        total=total,
        available=min(gather(available)),
        ranks=world_size(),
        ranks_per_engine=config.vllm_tensor_parallel_size,
        shape=Shape.of(model.config),
        sizes=PolicySizes.of(model, _optimizer(config, dtype), dtype.itemsize),
        engine_itemsize=of_engine,
        cache_itemsize=1 if eight_bit else of_engine,
        length=length,
        sequences=sequences,
        running=min(sequences, int(given.get("max_num_seqs") or MOST_SEQUENCES)),
        lengths=Lengths(prompt or max(length - completion, 1), completion, group),
        tokens=tokens,
        checkpointing=config.checkpointing,
        shared=shared,
        served=served,
        reshard=config.fsdp_reshard_after_forward,
        offloads_parts=config.fsdp_offload_params,
        sleeps=config.vllm_enable_sleep_mode,
        offloads=config.offload_optimizer,
        reference=reference,
        kv_bytes=int(given.get("kv_cache_memory_bytes") or 0),
        overruled=share_is_given(config),
        share=float(config.vllm_gpu_memory_utilization or given.get("gpu_memory_utilization") or 0.0),
        ways=WHOLE if is_adapted(model) or config.weights not in ("auto", "gathered") else AVAILABLE,
        tower=Tower.of(model),
    )


def _optimizer(config: GRPOConfig, dtype: torch.dtype) -> str:
    """Also of a configuration that isn't settled yet, as the model isn't loaded (`settle_precision`)."""
    if config.optim != "auto":
        return str(config.optim)
    return "adamw_split" if dtype == torch.bfloat16 else "adamw_torch"


def device_memory(device: torch.device, loaded: int) -> tuple[str, int, int]:
    """Name, total bytes, and bytes available to this rank if it held no tensor yet.

    Args:
        loaded: bytes of this rank's tensors in system memory, for a rank on a CPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.get_device_name(device), total, free + torch.cuda.memory_reserved(device)
    memory, ranks = psutil.virtual_memory(), process.local_world_size()
    of_ranks = "cpu" if ranks == 1 else f"cpu, shared by {ranks} ranks"
    return of_ranks, memory.total // ranks, min(memory.total, memory.available + loaded * ranks) // ranks
