"""Expandable segments of torch's allocator, which avoid fragmentation: each micro-batch has rows of other lengths."""

from __future__ import annotations

import os

import torch

from ..config import GRPOConfig

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments(config: GRPOConfig) -> bool:
    """Switch them on before the first allocation on a GPU, if the run supports them. Return whether they are on."""
    able = (
        config.device.type == "cuda"
        and not any(name in os.environ for name in VARIABLES)  # the user's setting has precedence
        and not config.vllm_enable_sleep_mode  # vLLM's memory pool for a sleeping KV cache can't have them
        and config.vllm_tensor_parallel_size == 1  # segments forbid the engine's ranks to open each other's memory
    )
    if able:
        torch.cuda.memory._set_allocator_settings(SETTING)
    return able
