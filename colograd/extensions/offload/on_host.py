"""Sharding strategies for `offload_gradients`: gradient sums in host memory, equal to device sums bit for bit.

Clipping doesn't write to host memory: the optimizer multiplies gradients by the clipping factor after it has copied
them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...config import GRPOConfig
from ...parallel import watchdog
from ...parallel.ranks import world_size
from ...parallel.shards import gradient_dtype, sum_over_ranks
from ...runtime.page_locked import host_empty, reserve
from ...sharding.strategy import ShardingStrategy
from ...sharding.zero import Bucket, SharedGradients, SharedOptimizer, WholeCopies, strategy_name
from .adamw import HostAdamW
from .host_stream import HostSums


class OnHost(ShardingStrategy):
    factor = 1.0  # Clipping factor of the gradients, which the optimizer applies if it is below 1.

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.sums = HostSums(self.trained[0].device)

    def backward(self, loss: torch.Tensor) -> None:
        self.sums.let_go()  # wait until gradients have left the device, because the head's backward needs memory
        super().backward(loss)

    def share(self, optimizer: Any) -> None:
        super().share(optimizer)
        optimizer.host_gradients = self
        optimizer.register_step_post_hook(lambda *_: self.discard())

    def of(self, part: torch.Tensor) -> torch.Tensor | None:
        return self.sums.get(part)

    def clip(self, largest: float) -> float:
        local = self.sums.squared_norm()
        norm = (self.sum_over_parts(local) if self.parts > 1 else local) ** 0.5
        self.factor = largest / (norm + 1e-6)
        return norm

    def gradients(self) -> Sequence[torch.Tensor]:
        keys: Sequence[Any] = getattr(self, "buckets", self.trained)
        return [total for key in keys if (total := self.sums.get(key)) is not None]

    def discard(self) -> None:
        self.sums.discard()
        self.factor = 1.0


class AddedInBackward(OnHost):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._inside = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.trained]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._inside and parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self.sums.add(parameter, gradient)

    def backward(self, loss: torch.Tensor) -> None:
        self._inside = True
        try:
            super().backward(loss)
        finally:
            self._inside = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class WholeOnHost(AddedInBackward, WholeCopies):
    def share(self, optimizer: Any) -> None:
        super().share(optimizer)
        reserve((p.numel() * gradient_dtype(p).itemsize for p in self.trained), self.sums.device)

    def sum_gradients(self) -> None:
        self.sums.settle()
        if world_size() > 1 or not self.gradients():
            for parameter in self.trained:
                if self.sums.get(parameter) is None:
                    self.sums.zero(parameter, gradient_dtype(parameter))
        if world_size() > 1:
            self.traffic.reduced += sum_over_ranks(self.gradients(), self.sums.device)


class PartsOnHost(OnHost, SharedOptimizer):
    """Base of strategies that keep this rank's part of each gradient bucket, summed over ranks, on the host."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._where = {piece.part: (bucket, place) for bucket in self.buckets for piece, place in bucket.places.items()}

    def of(self, part: torch.Tensor) -> torch.Tensor | None:
        bucket, place = self._where[part]
        return None if (total := self.sums.get(bucket)) is None else total[place]

    def _keep(self, bucket: Bucket, summed: torch.Tensor) -> None:
        self.sums.add(bucket, summed)

    def _has(self, bucket: Bucket) -> bool:
        return self.sums.get(bucket) is not None

    def sum_gradients(self) -> None:
        super().sum_gradients()
        self.sums.settle()


class OptimizerOnHost(AddedInBackward, PartsOnHost):
    """Strategy that adds this rank's gradients on the host, and sums them over ranks once per step.

    To save host memory, this rank's part of the sum over ranks overwrites the same elements of the local sum."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        for bucket in self.buckets:
            watchdog.progress()
            flat = host_empty(torch.Size([bucket.part * bucket.ranks]), bucket.gradient_dtype, self.sums.device)
            for parameter, start, size in zip(bucket.parameters, bucket.starts, bucket.sizes, strict=True):
                self.sums.places[parameter] = flat[start : start + size].view(parameter.shape)
            self.sums.places[bucket] = flat[bucket.begin : bucket.begin + bucket.part]

    def sum_gradients(self) -> None:
        self.sums.settle()
        super().sum_gradients()

    def _whole(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        return [self.sums.pop(parameter) for parameter in bucket.parameters]


class GradientsOnHost(PartsOnHost, SharedGradients):
    def share(self, optimizer: Any) -> None:
        super().share(optimizer)
        reserve((bucket.part * bucket.gradient_dtype.itemsize for bucket in self.buckets), self.sums.device)


# Strategies, by the setting `sharding`. FSDP has the setting `fsdp_offload_params` instead.
ON_HOST: dict[str, type[ShardingStrategy]]
ON_HOST = {"none": WholeOnHost, "optimizer": OptimizerOnHost, "gradients": GradientsOnHost}


def on_host(way: type[ShardingStrategy], config: GRPOConfig) -> type[ShardingStrategy]:
    if config.offloads_gradients:
        name = strategy_name(config)
        if name not in ON_HOST:  # another extension's
            raise ValueError(
                f"offload_gradients is true, but `sharding: {name}` sums gradients on the GPU: set offload_gradients: "
                "false, or sharding: gradients."
            )
        way = ON_HOST[name]
    if not config.streams_optimizer:
        return way

    class Reserving(way):  # type: ignore[valid-type, misc]
        def share(self, optimizer: Any) -> None:
            super().share(optimizer)
            if isinstance(optimizer, HostAdamW):
                optimizer.reserve()

    return Reserving
