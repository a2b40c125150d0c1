"""The optimizer's state moves to the host while the engine samples (`offload_optimizer: sampling`)."""

from __future__ import annotations

import torch

from ...config import GRPOConfig


def moves_of(config: GRPOConfig) -> OptimizerOffload | None:
    return OptimizerOffload() if config.offload_optimizer == "sampling" and not config.on_cpu else None


class OptimizerOffload:
    """Moves an optimizer's state to the host and back. Only the storage of the state's tensors changes, so references
    to the tensors stay valid. Scalars (`step`) don't move. The next move reuses the host memory, which is pinned if
    there is a GPU."""

    def __init__(self) -> None:
        self._host: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.Tensor, torch.device]] = []

    @torch.no_grad()
    def to_host(self, optimizer: torch.optim.Optimizer) -> int:
        """Move the state to the host, and return the moved bytes: 0 if the state is on the host, or not yet made."""
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
        """Move the state from the host back to the device, and return the moved bytes."""
        moved = sum(tensor.nbytes for tensor, _ in self._away)
        for tensor, device in self._away:
            tensor.data = torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
        self._wait()
        self._away = []
        return moved

    def _wait(self) -> None:
        if any(device.type == "cuda" for _, device in self._away):
            torch.cuda.synchronize()
