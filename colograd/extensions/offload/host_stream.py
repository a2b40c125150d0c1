"""Computation on the device with tensors that stay in page-locked host memory: optimizer state (`offload_optimizer:
stream`), and sums of gradients (`offload_gradients`).

A job is a kernel with a few host tensors that it reads or changes. Jobs use two buffers on the device by turns. While
a kernel runs on one buffer and its results return to the host, the other buffer is filled. So both directions of the
bus are busy at once.

`HostSums` adds gradients to sums in host memory while the backward continues, and frees them on the device.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...parallel import watchdog
from ...runtime.page_locked import host_empty

ELEMENTS = 2**23  # Elements per job. At 10 bytes each, a job takes 2 ms on the bus, far longer than a kernel's launch.
BUFFERS = 2
ALIGNED = 256  # Alignment of buffers in bytes, like the allocator's blocks. Kernels load 16 bytes at a time.

LIMIT = 2**30  # Largest number of gradient bytes in transfer at once. With more the backward waits for the bus.
ITEMSIZE = 10  # Largest number of bytes of optimizer state per element of a parameter.


class Job(NamedTuple):
    kernel: Callable[[Sequence[torch.Tensor]], Any]  # Called with device copies of `written`, then of `read`.
    written: Sequence[torch.Tensor] = ()  # Host tensors that the kernel changes. Their device copies are copied back.
    read: Sequence[torch.Tensor] = ()  # Host tensors that the kernel only reads.


def device_bytes(nbytes: int, itemsize: int = ITEMSIZE) -> int:
    """Return the device bytes of the two buffers, for ``nbytes`` of optimizer state (or, with an ``itemsize`` of 4, of
    gradient sums) in host memory."""
    return min(nbytes, BUFFERS * ELEMENTS * itemsize)


def on_way(gradients: int, largest: int) -> int:
    """Return the peak device memory of gradients during a backward, in bytes, from the bytes of all ``gradients`` and
    of the ``largest`` gradient, which is computed while other gradients are in transfer."""
    return min(gradients, LIMIT + largest)


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


class HostSums:
    """Gradient sums of one optimizer step, by key, in page-locked host memory that every step reuses. The first
    gradient is copied there. For a later gradient the sum is copied to the device in pieces, added to, and copied back,
    in parallel to the backward. Additions keep the order of the calls, so that sums equal device sums bit for bit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = HostStream(device, apart=True)
        self.places: dict[Hashable, torch.Tensor] = {}  # Host memory of each sum, by key.
        self._arrived: dict[Hashable, Any] = {}  # Event of the last copy to the host, by the sum's key.
        # Gradients on their way to the host, each with an event at the end of its copy.
        self._on_way: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()

    def __contains__(self, key: Hashable) -> bool:
        """Return whether this step has added a gradient to the sum of ``key``."""
        return key in self._arrived

    def get(self, key: Hashable) -> torch.Tensor | None:
        """Return the gradient sum of a key. Call `settle` first. None means that this step has added nothing to the
        sum."""
        return self.places[key] if key in self else None

    def pop(self, key: Hashable) -> torch.Tensor | None:
        """Return the gradient sum of a key like `get`, and then treat the step as one without this sum."""
        return None if self._arrived.pop(key, None) is None else self.places[key]

    @torch.no_grad()
    def add(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Queue the addition of a gradient to the sum of ``key``. The caller must not change the gradient any more."""
        place = self._place(key, gradient)
        flat, total = gradient.contiguous().view(-1), place.view(-1)
        stream, ready = self._stream, self._stream.event()
        if (arrived := self._arrived.get(key)) is None:
            stream.send(total, flat, ready)
        else:
            for piece, part in zip(flat.split(ELEMENTS), total.split(ELEMENTS), strict=True):
                stream.push(Job(lambda sums, piece=piece: sums[0].add_(piece), [part]), ready, arrived)  # type: ignore[misc]
        self._arrived[key] = stream.sent()
        self._on_way.append((self._arrived[key], flat))
        while sum(tensor.nbytes for _, tensor in self._on_way) > LIMIT:
            event, _ = self._on_way.popleft()
            stream.let_wait(event)

    def let_go(self) -> None:
        """Free gradients of earlier backwards on the device. The present stream waits for their copies to the host."""
        while self._on_way:
            self._stream.let_wait(self._on_way.popleft()[0])

    def zero(self, key: Hashable, like: torch.Tensor, dtype: torch.dtype) -> None:
        """Set the gradient sum of a key to zeros. Call `settle` first."""
        self._place(key, like, dtype).zero_()
        self._arrived[key] = self._stream.sent()

    def settle(self) -> None:
        self._stream.wait()
        self._on_way.clear()

    def discard(self) -> None:
        """Forget all sums. The next step reuses their memory."""
        self.let_go()
        self._arrived.clear()

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Return the sum of squares of all gradient sums, computed in float64. Call `settle` first."""
        norms: list[torch.Tensor] = []
        pieces = [piece for key in self._arrived for piece in self.places[key].view(-1).split(ELEMENTS)]

        def measure(tensors: Any) -> None:
            norms.append(torch.linalg.vector_norm(tensors[0], dtype=torch.float64))

        HostStream(self.device).run(Job(measure, read=[piece]) for piece in pieces)
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def _place(self, key: Hashable, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        place = self.places.get(key)
        if place is None:
            watchdog.progress()
            place = self.places[key] = host_empty(like.shape, dtype or like.dtype, self.device)
        return place
