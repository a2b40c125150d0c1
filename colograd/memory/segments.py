"""Expandable segments of torch's allocator: on by default, where nothing forbids them.

Rows have other lengths in each micro-batch, and blocks of fixed segments that fit none of the later ones stay unused
(fragmentation): the memory that a plan counts on isn't there. Segments that grow have no such holes.
"""

from __future__ import annotations

import os

import torch

from ..config import GRPOConfig

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def obstacle(config: GRPOConfig) -> str:
    """What forbids expandable segments; empty: nothing."""
    if config.device.type != "cuda":
        return "there is no GPU"
    if given := next((name for name in VARIABLES if name in os.environ), ""):
        return f"{given} says what is used"
    if config.vllm_enable_sleep_mode:
        return "the KV cache that sleeps is in a memory pool of vLLM's, which can't have them"
    if config.vllm_tensor_parallel_size > 1:
        return "ranks of an engine open each other's memory, which can't be done with them"
    return ""


def expand_segments(config: GRPOConfig) -> bool:
    """Switch them on before anything lies on the GPU; whether they are now."""
    if obstacle(config):
        return False
    torch.cuda.memory._set_allocator_settings(SETTING)
    return True
