"""Alternate use of a GPU's memory by the engine and the policy.

Weights stay where they are, because engine and policy may share them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..config import GRPOConfig
from ..engine.protocol import Engine
from ..reporting.metrics import PhaseTimes
from ..runtime import registry

DEVICE_ONLY = (
    "vllm_enable_sleep_mode", "offload_optimizer", "offload_gradients", "offload_reference", "offload_teacher",
)  # fmt: skip


class DeviceTurns:
    def __init__(self, engine: Engine, config: GRPOConfig, times: PhaseTimes) -> None:
        self.engine = engine
        # An object of the seam "optimizer_moves" has methods ``to_host(optimizer)`` and ``to_device()``.
        moves = (moves_of(config) for moves_of in registry.hooks("optimizer_moves"))
        self.offload: Any = next(filter(None, moves), None)
        self.times = times
        self.notes: Sequence[str] = [
            f"memory: {name} does nothing on a CPU, where sampling and training share all memory anyway"
            for name in DEVICE_ONLY
            if getattr(config, name) not in (False, "none") and config.on_cpu
        ]
        self._return_to_policy()  # Training may measure its memory before the first sampling.

    @contextmanager
    def sampling(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Give the memory to the engine while the context lasts. After an error the engine keeps the memory."""
        if self.offload is not None and optimizer is not None:
            with self.times.phase("offload"):
                self.offload.to_host(optimizer)
        if self.engine.asleep:
            with self.times.phase("wake"):
                self.engine.wake()
        yield
        self._return_to_policy()

    def _return_to_policy(self) -> None:
        if self.engine.sleeps:
            with self.times.phase("sleep"):
                self.engine.sleep()
        if self.offload is not None:
            with self.times.phase("offload"):
                self.offload.to_device()


# Environment variables with the user's settings of torch's CUDA allocator.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments(config: GRPOConfig) -> bool:
    """Turn on expandable segments of torch's CUDA allocator if the run supports them. Return whether they are on.

    With expandable segments rows of different lengths don't fragment memory. Call this before the first allocation.
    """
    able = (
        config.device.type == "cuda"
        and not any(name in os.environ for name in VARIABLES)  # The user's setting has precedence.
        and not config.vllm_enable_sleep_mode  # The memory pool of vLLM's sleep mode excludes expandable segments.
        and config.vllm_tensor_parallel_size == 1  # Ranks of one engine can't open each other's expandable segments.
    )
    if able:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return able
