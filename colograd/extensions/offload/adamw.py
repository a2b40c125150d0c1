"""AdamW with its state or gradients in host memory, and an offload of optimizer state to the host during sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...config import GRPOConfig
from ...parallel import watchdog
from ...runtime.page_locked import host_empty, reserve
from ...training.adamw_split import DTYPES, MOMENTS, AdamWSplit, Piece, Step, Steps
from .host_stream import ELEMENTS, HostStream, Job


class HostAdamW(AdamWSplit):
    host_gradients: Any = None  # `OnHost` strategy: its gradient sums replace `grad`. None: use `grad`.

    def __init__(self, params: Iterable[Any], streamed: bool = False, **settings: Any) -> None:
        self.streamed = streamed
        super().__init__(params, **settings)

    def reserve(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        sizes = [
            parameter.numel() * DTYPES[name].itemsize
            for parameter in parameters
            for name in (DTYPES if parameter.dtype == torch.bfloat16 else MOMENTS)
        ]
        if parameters:
            reserve(sizes, parameters[0].device)

    def _run(self, device: torch.device, fused: tuple[list[Piece], Step], plain: tuple[list[Piece], Steps]) -> None:
        if not self.streamed and self.host_gradients is None:
            super()._run(device, fused, plain)
            return
        factor, read = (1.0, []) if self.host_gradients is None else (self.host_gradients.factor, ["grad"])

        def job(piece: Piece, update: Callable[[Piece], None]) -> Job:
            state = [name for name in DTYPES if self.streamed and getattr(piece, name) is not None]

            def kernel(tensors: Sequence[torch.Tensor]) -> None:
                copy = piece._replace(**dict(zip((*state, *read), tensors, strict=True)))
                if factor < 1.0:
                    copy.grad.mul_(factor)
                update(copy)

            return Job(kernel, [getattr(piece, name) for name in state], [getattr(piece, name) for name in read])

        updates = ((fused[0], fused[1]), (plain[0], lambda piece: plain[1]([piece])))
        HostStream(device).run(
            job(piece, update) for wholes, update in updates for whole in wholes for piece in whole.cut(ELEMENTS)
        )

    def _gradient(self, parameter: torch.Tensor) -> Any:
        return parameter.grad if self.host_gradients is None else self.host_gradients.of(parameter)

    def _place(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        if not self.streamed:
            return super()._place(parameter, name)
        watchdog.progress()  # report progress, because page-locking a large model's state may take minutes
        return host_empty(parameter.shape, DTYPES[name], parameter.device)

    def _loaded(self, parameter: torch.Tensor, name: str, saved: torch.Tensor) -> torch.Tensor:
        on_device = super()._loaded
        return self._place(parameter, name).copy_(saved) if self.streamed else on_device(parameter, name, saved)


def host_adamw_of(args: GRPOConfig, model: torch.nn.Module) -> tuple[type[AdamWSplit], dict[str, Any]] | None:
    on_host = args.streams_optimizer or args.offloads_gradients
    return (HostAdamW, {"streamed": args.streams_optimizer}) if on_host else None


def moves_of(config: GRPOConfig) -> OptimizerOffload | None:
    return OptimizerOffload() if config.offload_optimizer == "sampling" and not config.on_cpu else None


class OptimizerOffload:
    """Moves optimizer state between host and device. References to the state's tensors stay valid."""

    def __init__(self) -> None:
        self._host: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.Tensor, torch.device]] = []

    @torch.no_grad()
    def to_host(self, optimizer: torch.optim.Optimizer) -> int:
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
        for tensor, device in self._away:
            tensor.data = torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
        self._wait()
        moved, self._away = sum(tensor.nbytes for tensor, _ in self._away), []
        return moved

    def _wait(self) -> None:
        if any(device.type == "cuda" for _, device in self._away):
            torch.cuda.synchronize()
