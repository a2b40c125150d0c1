"""The optimizer's state stays in the host's page-locked memory and passes through the device while the optimizer steps
(`offload_optimizer: stream`).

A job is a few tensors of the host and the kernel that changes them. Two buffers on the device take turns: while one is
computed with, and goes back to the host, the other one is filled; both directions of the bus are busy at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

ELEMENTS = 2**23  # of a job: with 10 bytes each 84 MB, some 2 ms on the bus, beside which a launch is nothing
BUFFERS = 2
ALIGNED = 256  # bytes, as the allocator's blocks: kernels load 16 bytes at a time

ITEMSIZE = 10  # bytes of state per element, at most

Job = tuple[Sequence[torch.Tensor], Callable[[Sequence[torch.Tensor]], None]]


def device_bytes(state: int) -> int:
    """Bytes that a state of ``state`` bytes takes on the device while it passes through."""
    return min(state, BUFFERS * ELEMENTS * ITEMSIZE)


class StateStream:
    """Runs jobs of one device, each on copies of its host tensors there, which are then copied back.

    Elements are computed as without it, by the same kernels: the results have the same bits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._torch: Any = torch.get_device_module(device)  # a CPU's streams do nothing

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs in order. The host waits until their tensors have the new values."""
        lanes = itertools.cycle([_Lane(self._torch, self.device) for _ in range(BUFFERS)])
        filling, emptying, computing = self._torch.Stream(), self._torch.Stream(), self._torch.current_stream()
        filled: list[tuple[_Lane, Job]] = []

        def finish(lane: _Lane, job: Job) -> None:
            host, kernel = job
            lane.filled.wait(computing)
            kernel(lane.tensors)
            lane.computed.record(computing)
            lane.computed.wait(emptying)
            with self._torch.stream(emptying):
                for place, tensor in zip(host, lane.tensors, strict=True):
                    place.copy_(tensor, non_blocking=True)
            lane.emptied.record(emptying)

        for job in jobs:
            lane = next(lanes)
            lane.make_room(job[0], computing, filling)
            lane.emptied.wait(filling)
            with self._torch.stream(filling):
                for place, tensor in zip(lane.tensors, job[0], strict=True):
                    place.copy_(tensor, non_blocking=True)
            lane.filled.record(filling)
            filled.append((lane, job))
            if len(filled) == BUFFERS:  # the next job is on its way while this one is computed
                finish(*filled.pop(0))
        for lane, job in filled:
            finish(lane, job)
        done = self._torch.Event()
        done.record(emptying)
        done.synchronize()


class _Lane:
    """A buffer on the device, with views of the present job's shapes, and the events of its turn."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device, self.filled, self.computed, self.emptied = device, module.Event(), module.Event(), module.Event()
        self.tensors: list[torch.Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def make_room(self, host: Sequence[torch.Tensor], computing: Any, filling: Any) -> None:
        """Views for copies of ``host``, in a larger buffer where they want one."""
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in host]
        if sum(sizes) > len(self._buffer):
            if len(self._buffer):
                self.emptied.synchronize()  # before the smaller one is somebody else's memory
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.computed.record(computing)  # what had this memory before is done with it by then
            self.computed.wait(filling)
        starts = itertools.accumulate([0, *sizes])
        self.tensors = [
            self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, host, strict=False)
        ]
