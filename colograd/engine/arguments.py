"""The arguments of `vllm.LLM` for a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, get_args

import torch

from ..config import GRPOConfig
from ..policy.lora import Adapter
from ..policy.supported import read_config
from ..runtime import registry
from .protocol import EngineUse

# Tokens per KV cache block on a CPU. The completions of one prompt share only full blocks of the prompt. vLLM's
# default blocks of 128 tokens are longer than most prompts.
CPU_BLOCK = 32
MOST_SEQUENCES = 1024  # Default maximum of sequences decoded at once, as in vLLM on the largest GPUs.
FAR_APART = 128  # Distance in tokens between CUDA graph sizes above the sizes for training.
VOCABULARY_BLOCK = 64  # vLLM pads a vocabulary to a multiple of 64 rows before it splits the rows over ranks.
KEEPS_EXPERTS = "triton"  # vLLM's MoE kernel for GPUs that keeps expert weights in a checkpoint's layout
V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
RESERVED = (  # Arguments of vllm.LLM that only the trainer may set.
    "distributed_executor_backend", "logprobs_mode", "tensor_parallel_size", "model", "enable_lora", "max_loras",
    "max_cpu_loras", "max_lora_rank", "lora_target_modules", "moe_backend",
    "enable_return_routed_experts", "return_sampling_mask",
)  # fmt: skip


def engine_kwargs(
    model_path: str, config: GRPOConfig, dtype: torch.dtype, context: int | None, kv_bytes: int,
    use: EngineUse = EngineUse(),
) -> dict[str, Any]:  # fmt: skip
    given: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    for name in RESERVED:
        if name in given:
            raise ValueError(f"vllm_engine_kwargs sets {name!r}, which the trainer sets itself: remove it.")
    if "enable_sleep_mode" in given:
        raise ValueError("vllm_engine_kwargs sets 'enable_sleep_mode': remove it, and set vllm_enable_sleep_mode.")
    if given.get("speculative_config"):
        registry.require("drafts", "speculative_config in vllm_engine_kwargs")
    kwargs: dict[str, Any] = {
        "model": model_path,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",  # log-probabilities after temperature, top-k and top-p
        "trust_remote_code": config.trust_remote_code,
        "model_impl": config.vllm_model_impl,
        "enforce_eager": not compiles(config),
        "use_tqdm_on_load": False,
        "revision": (config.model_init_kwargs or {}).get("revision"),  # type: ignore[union-attr]
        "max_model_len": context,
        "kv_cache_memory_bytes": kv_bytes or None,
    }
    if config.cast_lm_head_to_fp32 and computes_float32_heads():
        kwargs["hf_overrides"] = {"head_dtype": "float32"} | _given_overrides(given.pop("hf_overrides", None))
    if config.world_size > 1:
        kwargs["distributed_timeout_seconds"] = kwargs["cpu_distributed_timeout_seconds"] = config.ddp_timeout
    if config.vllm_tensor_parallel_size > 1:
        # In some versions of vLLM an asynchronous scheduler depends on whether the rank's own batch is done. Then the
        # ranks of one engine could choose different batches.
        kwargs["async_scheduling"] = False
    if config.on_cpu:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        kwargs["block_size"] = CPU_BLOCK
        # CPU_MLA is vLLM's plain CPU kernel for multi-head latent attention (MLA). vLLM's AMX kernel repacks weights,
        # so that a weight sync can't write them.
        kwargs["attention_backend"] = getattr(AttentionBackendEnum, "CPU_MLA", None)
    else:
        # With `kv_cache_memory_bytes` vLLM only checks that the share `gpu_memory_utilization` of the GPU is free.
        kwargs["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization or (0.01 if kv_bytes else None)
        kwargs["enable_sleep_mode"] = config.vllm_enable_sleep_mode
        kwargs["moe_backend"] = KEEPS_EXPERTS
        if torch.cuda.device_count() < config.vllm_tensor_parallel_size:
            kwargs["disable_custom_all_reduce"] = True  # The all-reduce would query GPUs hidden from this process.
        if use.sequences:  # vLLM's default of max_num_seqs ignores the run's batch size.
            width = int(given.get("max_num_seqs") or min(use.sequences, MOST_SEQUENCES))
            kwargs["max_num_seqs"] = width
            says_graphs = any(name == "compilation_config" or "cudagraph" in name for name in given)
            if compiles(config) and not says_graphs:
                drafts = int((given.get("speculative_config") or {}).get("num_speculative_tokens") or 0)
                most = min(width * (drafts + 1), MOST_SEQUENCES) if drafts else 0
                kwargs["cudagraph_capture_sizes"] = graph_sizes(width, use.trained or use.sequences, most, drafts + 1)
    return {name: value for name, value in kwargs.items() if value is not None} | given


def runs_v2(config: GRPOConfig, setting: str, remedy: str) -> bool:
    """Return whether vLLM uses its Model Runner V2, which can return routed experts and sampling masks."""
    import vllm.envs

    if config.on_cpu:
        return bool(vllm.envs.VLLM_USE_V2_MODEL_RUNNER)
    if os.environ.get(V2_SWITCH) and not vllm.envs.VLLM_USE_V2_MODEL_RUNNER:
        raise ValueError(
            f"{setting}, which needs vLLM's Model Runner V2 on a GPU, but {V2_SWITCH} is {os.environ[V2_SWITCH]}: "
            f"remove the variable, or set {remedy}."
        )
    return True


def graph_sizes(width: int, trained: int, most: int = 0, multiple: int = 1) -> list[int]:
    """Return the batch sizes, in tokens, of the CUDA graphs that vLLM captures. A graph costs memory and time at start.

    Sizes up to ``trained`` sequences (the maximum in training) are close together. Larger sizes, up to ``width``
    sequences (the maximum of an engine step), are far apart. In speculative decoding a sequence has ``multiple``
    tokens per step, and the largest size is ``most``. vLLM drops sizes that aren't multiples of ``multiple``.
    """
    fine, largest = min(trained, width) * multiple, max(width, most)
    near = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, MOST_SEQUENCES + 1, 32)}
    far = range(FAR_APART, largest + 1, FAR_APART)
    sizes = {size for size in near if size <= fine} | {size for size in far if size > fine} | {fine, width, most}
    return sorted({-(-size // multiple) * multiple for size in sizes if 0 < size <= largest})


def compiles(config: GRPOConfig) -> bool:
    given: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    return not given.get("enforce_eager", config.on_cpu)


def accepted(*names: str) -> list[str]:
    """Return the ``names`` that are arguments of `vllm.LLM` in the installed version of vLLM."""
    from vllm import EngineArgs

    return [name for name in names if name in inspect.signature(EngineArgs).parameters]


def computes_float32_heads() -> bool:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return hasattr(LogitsProcessor, "_apply_head")


def _given_overrides(given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise ValueError(
            f"vllm_engine_kwargs sets 'hf_overrides' to {given!r}, but `hf_overrides` must be a mapping, "
            "because `cast_lm_head_to_fp32` or a quantised policy adds keys to the mapping. Set a mapping."
        )
    return given or {}


def check_parts(model_config: Any, ranks: int, world_size: int) -> None:
    if ranks == 1:
        return
    text = model_config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    vocabulary = -(-int(text.vocab_size) // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    sizes = {
        "num_attention_heads": heads,
        "intermediate_size": int(getattr(text, "intermediate_size", 0) or 0),
        f"vocab_size (filled up to a multiple of {VOCABULARY_BLOCK})": vocabulary,
    }
    keys = int(getattr(text, "num_key_value_heads", 0) or heads)
    if keys > ranks or ranks % keys:  # with fewer key-value heads than ranks, vLLM copies heads
        sizes["num_key_value_heads"] = keys
    vision = getattr(model_config, "vision_config", None)
    if vision is not None:  # the vision tower is split over ranks like the text model
        names = ("num_heads", "num_attention_heads", "intermediate_size")
        sizes |= {f"vision_config.{name}": int(getattr(vision, name)) for name in names if hasattr(vision, name)}
    for name, size in sizes.items():
        if size % ranks:
            able = [str(n) for n in range(1, world_size + 1) if world_size % n == 0 and size % n == 0]
            raise ValueError(
                f"vllm_tensor_parallel_size is {ranks}, but must divide the model's {name}, which is {size}: choose "
                f"one of {', '.join(able)}."
            )


def lora_kwargs(model_path: str, config: GRPOConfig, adapter: Adapter | None) -> dict[str, Any]:
    if adapter is None or not serves_lora(model_path, config):
        return {}
    from vllm.config.lora import MaxLoRARanks

    rank = min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank)
    slot = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
    return slot | {"lora_target_modules": list(adapter.targets)}  # only layers that the adapter changes get LoRA slots


def blank_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that, added to ``kwargs``, make vLLM skip all weights except a draft model's."""
    from vllm.config import LoadConfig

    overrides = _given_overrides(kwargs.get("hf_overrides"))
    blank = {"load_format": "dummy", "hf_overrides": {**overrides, "quantization_config": None}}
    if "speculative_config" in kwargs:
        blank["speculative_config"] = {"draft_load_config": LoadConfig(), **kwargs["speculative_config"]}
    return blank


def serves_lora(model_path: str, config: GRPOConfig) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    names = getattr(read_config(model_path, config), "architectures", None) or ()
    known = [ModelRegistry.models[name] for name in names if name in ModelRegistry.models]
    return not known or bool(supports_lora(known[0].load_model_cls()))


def engine_dtype(config: GRPOConfig, dtype: torch.dtype) -> torch.dtype:
    name = str((config.vllm_engine_kwargs or {}).get("dtype") or "").removeprefix("torch.")  # type: ignore[union-attr]
    chosen = getattr(torch, name, None)
    return chosen if isinstance(chosen, torch.dtype) else dtype


def share_is_given(config: GRPOConfig) -> bool:
    given: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    names = ("gpu_memory_utilization", "num_gpu_blocks_override")
    return config.vllm_gpu_memory_utilization is not None or any(given.get(name) for name in names)
