"""ZeRO (arXiv 1910.02054) over parameters that stay whole, and stay where they are: in the engine's memory, say.

Each rank's optimizer has views of its N-th of every bucket, and writes straight into the policy. The other ranks'
elements come by an all-gather, into the same tensors: where these are the engine's, that is the publishing too.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from ..parallel.ranks import on_all_ranks, rank
from .buckets import Bucket, Reduction, buckets_of
from .parts import SharedParts
from .strategy import Owned, drop_graph

IN_FLIGHT = 2  # reductions at once: the next gradients are computed meanwhile, and their memory is bounded


class SharedOptimizer(SharedParts):
    """Stage 1: the optimizer's state is shared out. Gradients are whole until a step's last backward."""

    shared_out, exchanged = "optimizer state", "once per step"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        among = self.among
        place, group = (rank(), None) if among is None else (among.place, among.group)
        self.buckets: list[Bucket] = buckets_of(model, place, self.parts, group=group)
        self._under_way: collections.deque[Reduction] = collections.deque()

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
        self._under_way.append(bucket.reduce(self._whole(bucket)))

    def _whole(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        """This rank's gradients of a bucket, which are let go of here."""
        gradients = [parameter.grad for parameter in bucket.parameters]
        for parameter in bucket.parameters:
            parameter.grad = None
        return gradients

    def _keep(self, bucket: Bucket, summed: torch.Tensor) -> None:
        """Add what a reduction brought to this rank's part of the step's gradient."""
        bucket.add(summed)

    def _has(self, bucket: Bucket) -> bool:
        """Whether something was added in this step."""
        return bucket.sum is not None

    def _finish(self, but: int = 0) -> None:
        while len(self._under_way) > but:
            self.traffic.reduced += self._under_way.popleft().finish(self._keep)

    def gradients(self) -> Sequence[torch.Tensor]:
        return [bucket.sum for bucket in self.buckets if bucket.sum is not None]

    @property
    def device(self) -> torch.device:
        return self.buckets[0].parameters[0].device

    def discard(self) -> None:
        for bucket in self.buckets:
            bucket.discard()

    def owned(self) -> Sequence[Owned]:
        return [piece for bucket in self.buckets for piece in bucket.owned]

    def gather_weights(self) -> None:
        for bucket in self.buckets:
            self.traffic.gathered += bucket.gather()


class SharedGradients(SharedOptimizer):
    """Stage 2: gradients are shared out too. A bucket's are reduced, and freed, as soon as a backward has made them."""

    meets_in_backward, shared_out, exchanged = True, "optimizer state and gradients", "in each backward"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._next = len(self.buckets)  # bucket to reduce: outside of a backward none
        self._amid = True  # whether the present backward's are reduced amid it
        self._missing: list[int] = []  # gradients of each bucket that this backward hasn't made yet
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._made(index))
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def agree(self, what: str) -> AbstractContextManager[None]:
        return on_all_ranks(what)

    def backward(self, loss: torch.Tensor) -> None:
        """A collective. Should it fail on this rank, the others' exchanges are still answered, with zeros."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._next, self._amid = 0, self._goes_alike(loss)
        try:
            loss.backward()
        except BaseException as error:
            drop_graph(loss, error)
            self.failed(error)
            self.model.zero_grad(set_to_none=True)  # room for what is still to be answered
            raise
        finally:
            while self._next < len(self.buckets):
                self._reduce_next()
            self._finish()

    def _goes_alike(self, loss: torch.Tensor) -> bool:
        """Whether buckets may be reduced amid this backward; if not, they are when it has ended."""
        return True

    def _made(self, index: int) -> None:
        """A gradient of bucket ``index`` is there. Buckets go in their order, which is the same on all ranks."""
        if not self._amid or self._next == len(self.buckets):
            return
        self._missing[index] -= 1
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        self._reduce(self.buckets[self._next])
        self._next += 1

    def sum_gradients(self) -> None:
        """All of it was done in the backwards; after a step without any there are zeros."""
        for bucket in self.buckets:
            if not self._has(bucket):
                zeros = torch.zeros(bucket.part, dtype=bucket.gradient_dtype, device=bucket.parameters[0].device)
                self._keep(bucket, zeros)
