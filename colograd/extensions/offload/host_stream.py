"""Computation on the device with tensors that stay in page-locked host memory: optimizer state (`offload_optimizer:
stream`), and sums of gradients (`offload_gradients`).

A job is a kernel with a few host tensors that it reads or changes. Jobs use two buffers on the device by turns. While
a kernel runs on one buffer and its results return to the host, the other buffer is filled. So both directions of the
bus are busy at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

ELEMENTS = 2**23  # Elements per job. 84 MB of 10 bytes each take 2 ms on the bus, far longer than a kernel's launch.
BUFFERS = 2
ALIGNED = 256  # Alignment of buffers in bytes, like the allocator's blocks. Kernels load 16 bytes at a time.

ITEMSIZE = 10  # Largest number of bytes of optimizer state per element of a parameter.


class Job(NamedTuple):
    kernel: Callable[[Sequence[torch.Tensor]], Any]  # Called with device copies of `written`, then of `read`.
    written: Sequence[torch.Tensor] = ()  # Host tensors that the kernel changes. Their device copies are copied back.
    read: Sequence[torch.Tensor] = ()  # Host tensors that the kernel only reads.


def device_bytes(state: int) -> int:
    """Return the device bytes of the two buffers, for an optimizer state of ``state`` bytes in host memory."""
    return min(state, BUFFERS * ELEMENTS * ITEMSIZE)


class HostStream:
    """Runs jobs on one device in order. Streaming changes no kernel, so results equal those without it bit for bit.
    ``apart``: run the kernels on a separate CUDA stream, so that the present stream never waits for the bus."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        # The device's module in torch. On a CPU this is `torch.cpu`, and its streams do nothing.
        self._torch: Any = torch.get_device_module(device)
        self.filling, self.emptying = self._torch.Stream(), self._torch.Stream()
        self._apart = self._torch.Stream() if apart else None
        self._lanes: list[_Lane] = []
        self._turns = itertools.cycle(range(BUFFERS))

    def event(self, stream: Any = None) -> Any:
        """Return an event that ends after all work that is now queued on a stream. None means the present stream."""
        event = self._torch.Event()
        event.record(stream or self._torch.current_stream())
        return event

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs. The host waits until the jobs' host tensors have their new values."""
        for job in jobs:
            self.push(job)
        self.wait()

    @torch.no_grad()
    def push(self, job: Job, made: Any = None, arrived: Any = None) -> None:
        """Queue a job. The host doesn't wait for the job's end. ``made``: event that the kernel waits for. ``arrived``:
        event after which the job's host tensors may be read."""
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
        """Queue a copy of a device's ``tensor`` to the host tensor ``place``, after the event ``made``."""
        made.wait(self.emptying)
        with self._torch.stream(self.emptying):
            place.copy_(tensor, non_blocking=True)

    def sent(self) -> Any:
        """Return an event that ends when all copies to the host that are now queued have arrived."""
        return self.event(self.emptying)

    def let_wait(self, event: Any) -> None:
        """Make the present stream wait for ``event``, so that memory isn't reused while a copy still reads it."""
        event.wait(self._torch.current_stream())

    def wait(self) -> None:
        """Make the host wait until all jobs are done, and free the buffers on the device."""
        self.sent().synchronize()
        self._lanes = []


class _Lane:
    """One of two buffers on the device: views with the shapes of a job's tensors, and events of the job's stages."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device, self.filled, self.computed, self.emptied = device, module.Event(), module.Event(), module.Event()
        self.tensors: list[torch.Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def make_room(self, host: Sequence[torch.Tensor], present: Any, filling: Any) -> None:
        """Set ``tensors`` to views of the buffer with the shapes of ``host``. Enlarge a buffer that is too small."""
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in host]
        if sum(sizes) > len(self._buffer):
            if len(self._buffer):
                self.emptied.synchronize()  # Wait until the smaller buffer's memory can be reused.
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.computed.record(present)  # Earlier users of the new buffer's memory are done after this event.
            self.computed.wait(filling)
        starts = itertools.accumulate([0, *sizes])
        self.tensors = [
            self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, host, strict=False)
        ]
