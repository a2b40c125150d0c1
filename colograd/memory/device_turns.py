"""Turns of the engine and the policy in the device's memory, on GPUs only: the KV cache sleeps while the policy trains
(`vllm_enable_sleep_mode`), and the optimizer's state is on the host while the engine samples (`offload_optimizer:
sampling`). Weights never move: the policy may share them with the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..config import GRPOConfig
from ..engine.protocol import Engine
from ..reporting.metrics import PhaseTimes


class OptimizerOffload:
    """The moves of an optimizer's state to the host and back.

    The tensors stay the same objects with other storage, so references to them stay valid. Scalars (`step`) don't move.
    The host's copies are pinned if there is a GPU, and kept for the next move.
    """

    def __init__(self) -> None:
        self._host: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.Tensor, torch.device]] = []

    @torch.no_grad()
    def to_host(self, optimizer: torch.optim.Optimizer) -> int:
        """Move the state to the host. Return the bytes moved: 0 if it is there already, or not allocated yet."""
        if self._away:
            return 0
        values = [value for state in optimizer.state.values() for value in state.values()]
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0}
        self._host = {key: copy for key, copy in self._host.items() if key in tensors}
        for key, tensor in tensors.items():
            copy = self._host.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=True)
            self._away.append((tensor, tensor.device))
        self._wait()
        for tensor, _ in self._away:
            tensor.data = self._host[id(tensor)]
        return sum(tensor.nbytes for tensor, _ in self._away)

    @torch.no_grad()
    def to_device(self) -> int:
        """Move the state back, bit for bit. Return the bytes moved."""
        moved = sum(tensor.nbytes for tensor, _ in self._away)
        for tensor, device in self._away:
            tensor.data = torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
        self._wait()
        self._away = []
        return moved

    def _wait(self) -> None:
        if any(device.type == "cuda" for _, device in self._away):
            torch.cuda.synchronize()


DEVICE_ONLY = (
    "vllm_enable_sleep_mode", "offload_optimizer", "offload_gradients", "offload_reference", "offload_teacher",
)  # fmt: skip


class DeviceTurns:
    """The turns of the engine and the policy in the device's memory."""

    def __init__(self, engine: Engine, config: GRPOConfig, times: PhaseTimes) -> None:
        self.engine = engine
        self.offload = OptimizerOffload() if config.offload_optimizer == "sampling" and not config.on_cpu else None
        self.times = times
        self.notes: Sequence[str] = [
            f"memory: {name} does nothing on a CPU, where sampling and training share all memory anyway"
            for name in DEVICE_ONLY
            if getattr(config, name) not in (False, "none") and config.on_cpu
        ]
        self._return_to_policy()  # the first training forward may be measured before anything is sampled

    @contextmanager
    def sampling(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Give the memory to the engine while the body samples. After an error the engine keeps it for its requests."""
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
