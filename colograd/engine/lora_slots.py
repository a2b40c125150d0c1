"""vLLM's LoRA slots: whether a model's class can have them, and the arguments that make one."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from ..config import GRPOConfig
from ..policy.lora import Adapter


def serves(model_path: str, config: GRPOConfig) -> bool:
    """Whether vLLM's class of this model takes adapters at all (it would refuse to be built with slots for one)."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry, supports_lora

    revision = (config.model_init_kwargs or {}).get("revision")  # type: ignore[union-attr]
    model = AutoConfig.from_pretrained(model_path, revision=revision, trust_remote_code=config.trust_remote_code)
    known = [ModelRegistry.models[name] for name in model.architectures or () if name in ModelRegistry.models]
    return not known or bool(supports_lora(known[0].load_model_cls()))


def engine_kwargs(model_path: str, config: GRPOConfig, adapter: Adapter | None) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for one slot that the adapter fits in, on the layers that it adapts."""
    if adapter is None or not serves(model_path, config):
        return {}
    from vllm import EngineArgs
    from vllm.config.lora import MaxLoRARanks

    rank = min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank)
    kwargs = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
    if "lora_target_modules" in inspect.signature(EngineArgs).parameters:  # other layers then need no slots
        kwargs["lora_target_modules"] = list(adapter.targets)
    return kwargs
