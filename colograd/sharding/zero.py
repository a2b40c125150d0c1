"""ZeRO (arXiv 1910.02054), and `WholeCopies` without sharding. Parameters stay whole in their memory.

With ZeRO the optimizer of a rank has views of its N-th of every bucket (group of parameters), and writes into the
policy's tensors. An all-gather writes the elements of other ranks into the policy's tensors. If the policy shares the
engine's memory, the engine gets the new weights by that all-gather. With `WholeCopies` (`sharding: none`) every rank
has the whole summed gradient and the whole optimizer state.
"""

from __future__ import annotations

import collections
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ..parallel import watchdog
from ..parallel.gradients import sum_over_ranks, zero_gradients
from ..parallel.ranks import on_all_ranks, rank, world_size
from . import optimizer_state
from .buckets import Bucket, buckets_of, reduce_scatter
from .strategy import Owned, ShardingStrategy, WriteTensors, drop_graph, scale_down, squared_norm

IN_FLIGHT = 2  # Maximum number of reductions that run at once, to limit memory. Reductions overlap with the backward.


class WholeCopies(ShardingStrategy):
    name = "none"

    def describe(self) -> str:
        return ""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing, because every rank's optimizer updates all parameters."""

    def sum_gradients(self) -> None:
        parameters, size = list(self.model.parameters()), world_size() if self.among is None else self.among.size
        if size > 1 or all(parameter.grad is None for parameter in parameters):  # no micro-batch has computed gradients
            zero_gradients(parameters)
        if size > 1:
            self.traffic.reduced += sum_over_ranks(self.gradients(), among=self.among)

    def gradients(self) -> Sequence[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self, largest: float) -> float:
        gradients = self.gradients()
        norm = squared_norm(gradients) ** 0.5
        scale_down(gradients, norm, largest)
        return norm

    def discard(self) -> None:
        """Do nothing, because the caller sets gradients to None before it repeats a step."""

    def owned(self) -> Sequence[Owned]:
        trained = self.model.named_parameters()
        return [Owned(name, p, 0, p.numel()) for name, p in trained if p.requires_grad]

    def gather_weights(self) -> None:
        """Do nothing, because each rank has updated all weights."""

    def cuts_optimizer(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> bool:
        return optimizer_state.can_be_cut(optimizer, owned)

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        if not self.cuts_optimizer(optimizer, self.owned()):
            return False
        if keep:
            optimizer_state.save(optimizer, self.owned(), folder, 0, 1, write)
        return True

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        if not optimizer_state.is_sharded(folder):
            return False
        optimizer_state.load(optimizer, self.owned(), folder)
        return True


class SharedParts(ShardingStrategy):
    """The base of strategies where one rank has the summed gradient and the optimizer state of a trained element."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.parts = world_size() if self.among is None else self.among.size
        self._order: list[str] = []  # names of all trained parameters in the order of an optimizer without sharding

    @abstractmethod
    def _after_step(self) -> None:
        """Drop gradients after the optimizer's step, and gather weights if every rank keeps all weights."""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        pieces = {piece.name: piece.part for piece in self.owned()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in optimizer.param_groups:
            named = [names[id(parameter)] for parameter in group["params"]]
            self._order += named
            group["params"] = [pieces[name] for name in named if name in pieces]
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def clip(self, largest: float) -> float:
        sums = self.gradients()
        total = torch.tensor(squared_norm(sums), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        norm = float(total) ** 0.5
        scale_down(sums, norm, largest)
        return norm

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the tensors that ranks exchange."""

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, folder: Path, keep: bool = True, write: WriteTensors = save_file
    ) -> bool:
        optimizer_state.save(optimizer, self.owned(), folder, rank(), world_size(), write)
        return True

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> bool:
        optimizer_state.load(optimizer, self.owned(), folder, self._order, rank(), world_size())
        return True


class SharedOptimizer(SharedParts):
    """ZeRO stage 1: ranks divide the optimizer's state. Each rank has whole gradients until a step's last backward."""

    name = "optimizer"
    shared_out, exchanged = "optimizer state", "once per step"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        among = self.among
        place, group = (rank(), None) if among is None else (among.place, among.group)
        self.buckets: list[Bucket] = buckets_of(model, place, self.parts, group=group)
        # Running reductions: bucket, input, output [part], and the collective. The input must live until the end.
        self._under_way: collections.deque[tuple[Bucket, torch.Tensor, torch.Tensor, dist.Work]] = collections.deque()

    def describe(self) -> str:
        elements = sum(sum(bucket.sizes) for bucket in self.buckets)
        return (
            f"sharding: {self.shared_out} of {elements / 1e6:,.1f} M trained parameters in {self.parts} parts, one per "
            f"rank; {len(self.buckets)} buckets, exchanged {self.exchanged}"
        )

    def _after_step(self) -> None:
        self.gather_weights()
        self.discard()

    def sum_gradients(self) -> None:
        for bucket in self.buckets:
            self._reduce(bucket)
        self._finish()

    def _reduce(self, bucket: Bucket) -> None:
        self._finish(but=IN_FLIGHT - 1)
        flat = bucket.flat(self._whole(bucket), bucket.gradient_dtype)
        summed = torch.empty(bucket.part, dtype=flat.dtype, device=flat.device)
        work = reduce_scatter(summed, flat, async_op=True, group=bucket.group)
        self._under_way.append((bucket, flat, summed, work))

    def _whole(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        """Return this rank's unsummed gradients of a bucket's parameters, and set the parameters' ``grad`` to None."""
        gradients = [parameter.grad for parameter in bucket.parameters]
        for parameter in bucket.parameters:
            parameter.grad = None
        return gradients

    def _keep(self, bucket: Bucket, summed: torch.Tensor) -> None:
        """Add ``summed``, a bucket's gradient summed over ranks, to this rank's part of the step's gradient."""
        bucket.add(summed)

    def _has(self, bucket: Bucket) -> bool:
        """Return whether this optimizer step has a summed gradient of the bucket."""
        return bucket.sum is not None

    def _finish(self, but: int = 0) -> None:
        while len(self._under_way) > but:
            bucket, flat, summed, work = self._under_way.popleft()
            watchdog.finish(work)
            self._keep(bucket, summed)
            self.traffic.reduced += flat.nbytes

    def gradients(self) -> Sequence[torch.Tensor]:
        return [bucket.sum for bucket in self.buckets if bucket.sum is not None]

    @property
    def device(self) -> torch.device:
        return self.buckets[0].parameters[0].device

    def discard(self) -> None:
        for bucket in self.buckets:
            bucket.discard()

    def owned(self) -> Sequence[Owned]:
        return [piece for bucket in self.buckets for piece in bucket.places]

    def gather_weights(self) -> None:
        for bucket in self.buckets:
            self.traffic.gathered += bucket.gather()


class SharedGradients(SharedOptimizer):
    """ZeRO stage 2: ranks divide gradients and optimizer state. A bucket's gradients are summed during the backward."""

    name = "gradients"
    meets_in_backward, shared_out, exchanged = True, "optimizer state and gradients", "in each backward"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._next = len(self.buckets)  # Index of the next bucket to sum. Outside of a backward no bucket is next.
        self._amid = True  # Whether ranks sum buckets during the present backward.
        self._missing: list[int] = []  # Gradients per bucket that this backward hasn't computed yet.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._on_gradient(index))
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def agree(self, what: str) -> AbstractContextManager[None]:
        return on_all_ranks(what)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward. If this rank fails, it sends zeros in the remaining collectives of the backward."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._next, self._amid = 0, self._goes_alike(loss)
        try:
            loss.backward()
        except BaseException as error:
            drop_graph(loss, error)
            self.failed(error)
            self.model.zero_grad(set_to_none=True)  # free memory for the backward's remaining collectives
            raise
        finally:
            while self._next < len(self.buckets):
                self._reduce_next()
            self._finish()

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Return whether ranks sum buckets during this backward. If not, ranks sum all buckets after the backward."""
        return True

    def _on_gradient(self, index: int) -> None:
        """Count a gradient of bucket ``index``. Sum complete buckets over ranks, in the same order on all ranks."""
        if not self._amid or self._next == len(self.buckets):
            return
        self._missing[index] -= 1
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        self._reduce(self.buckets[self._next])
        self._next += 1

    def sum_gradients(self) -> None:
        """Set gradients of buckets without a summed gradient to zeros, e.g. in a step without a micro-batch."""
        for bucket in self.buckets:
            if not self._has(bucket):
                zeros = torch.zeros(bucket.part, dtype=bucket.gradient_dtype, device=bucket.parameters[0].device)
                self._keep(bucket, zeros)
