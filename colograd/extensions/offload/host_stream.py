"""Transfer of tensors in the host's page-locked memory through the device: the optimizer's state while it steps
(`offload_optimizer: stream`), and the sums of gradients (`offload_gradients`).

A job is a few tensors of the host and the kernel that reads or changes them. Two buffers on the device take turns.
While one is computed with, and goes back to the host, the other one is filled, so both directions of the bus are busy
at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

ELEMENTS = 2**23  # elements per job: 84 MB of 10 bytes each, some 2 ms on the bus, far more than a launch
BUFFERS = 2
ALIGNED = 256  # bytes, as the allocator's blocks: kernels load 16 bytes at a time

ITEMSIZE = 10  # largest number of bytes of an optimizer's state per element


class Job(NamedTuple):
    kernel: Callable[[Sequence[torch.Tensor]], Any]  # called with the copies, in this order
    written: Sequence[torch.Tensor] = ()  # host tensors that get the copies' values afterwards
    read: Sequence[torch.Tensor] = ()  # host tensors that stay unchanged


def device_bytes(state: int) -> int:
    """Return the bytes on the device of a state of ``state`` bytes while it passes through."""
    return min(state, BUFFERS * ELEMENTS * ITEMSIZE)


class HostStream:
    """An executor of jobs on one device, in order. The kernels are the same as without streaming, so the results have
    the same bits. ``apart``: run jobs on a separate stream, so that no work on the present one waits for the bus."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        self._torch: Any = torch.get_device_module(device)  # a CPU's streams do nothing
        self.filling, self.emptying = self._torch.Stream(), self._torch.Stream()
        self._apart = self._torch.Stream() if apart else None
        self._lanes: list[_Lane] = []
        self._turns = itertools.cycle(range(BUFFERS))

    def event(self) -> Any:
        """Record an event after all work queued on the present stream so far."""
        event = self._torch.Event()
        event.record(self._torch.current_stream())
        return event

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs. The host waits until their tensors have the new values."""
        for job in jobs:
            self.push(job)
        self.wait()

    @torch.no_grad()
    def push(self, job: Job, made: Any = None, arrived: Any = None) -> None:
        """Queue a job; the host doesn't wait.

        Args:
            made: an event that the kernel waits for.
            arrived: an event after which the host's tensors are ready.
        """
        present = self._torch.current_stream()
        computing = self._apart or present
        self._lanes = self._lanes or [_Lane(self._torch, self.device) for _ in range(BUFFERS)]
        lane, host = self._lanes[next(self._turns)], (*job.written, *job.read)
        lane.make_room(host, present, self.filling)
        lane.emptied.wait(self.filling)
        if arrived is not None:
            arrived.wait(self.filling)
        with self._torch.stream(self.filling):
            for place, tensor in zip(lane.tensors, host, strict=True):
                place.copy_(tensor, non_blocking=True)
        lane.filled.record(self.filling)
        lane.filled.wait(computing)
        if made is not None:
            made.wait(computing)
        with self._torch.stream(computing):
            job.kernel(lane.tensors)
        lane.computed.record(computing)
        lane.computed.wait(self.emptying)
        with self._torch.stream(self.emptying):
            for place, tensor in zip(job.written, lane.tensors, strict=False):
                place.copy_(tensor, non_blocking=True)
        lane.emptied.record(self.emptying)

    @torch.no_grad()
    def send(self, place: torch.Tensor, tensor: torch.Tensor, made: Any) -> None:
        """Queue a copy of a device's ``tensor`` to its place on the host, after the event ``made``."""
        made.wait(self.emptying)
        with self._torch.stream(self.emptying):
            place.copy_(tensor, non_blocking=True)

    def sent(self) -> Any:
        """Record an event after which all queued copies so far are on the host."""
        event = self._torch.Event()
        event.record(self.emptying)
        return event

    def let_wait(self, event: Any) -> None:
        """Make the present stream wait for ``event``, so that it can't reuse freed memory that is still read."""
        event.wait(self._torch.current_stream())

    def wait(self) -> None:
        """Make the host wait until all jobs are done, and give the buffers back."""
        self.sent().synchronize()
        self._lanes = []


class _Lane:
    """A buffer on the device, with views of the present job's shapes, and the events of its turn."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device, self.filled, self.computed, self.emptied = device, module.Event(), module.Event(), module.Event()
        self.tensors: list[torch.Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def make_room(self, host: Sequence[torch.Tensor], present: Any, filling: Any) -> None:
        """Make views for copies of ``host``, in a larger buffer if they need one."""
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in host]
        if sum(sizes) > len(self._buffer):
            if len(self._buffer):
                self.emptied.synchronize()  # before the smaller buffer's memory is reused
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.computed.record(present)  # earlier work on this memory is done by then
            self.computed.wait(filling)
        starts = itertools.accumulate([0, *sizes])
        self.tensors = [
            self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, host, strict=False)
        ]
