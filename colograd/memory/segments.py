"""Expandable segments of torch's allocator, which avoid fragmentation: each micro-batch has rows of other lengths."""

from __future__ import annotations

import os

import torch

from ..config import GRPOConfig

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments(config: GRPOConfig) -> bool:
    """Switch them on, before the first allocation on a GPU, if the run can have them. Returns whether they are on."""
    able = (
        config.device.type == "cuda"
        and not any(name in os.environ for name in VARIABLES)  # the user's setting stands
        and not config.vllm_enable_sleep_mode  # vLLM's memory pool for a KV cache that sleeps can't have them
        and config.vllm_tensor_parallel_size == 1  # ranks of an engine open each other's memory, which they forbid
    )
    if able:
        torch.cuda.memory._set_allocator_settings(SETTING)
    return able
