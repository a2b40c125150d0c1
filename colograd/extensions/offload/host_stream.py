"""Computation on the device with tensors that stay in page-locked host memory.

Jobs use two buffers on the device by turns. While a kernel runs on one buffer and its results return to the host, the
other buffer is filled, so that both directions of the bus are busy at once."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...parallel import watchdog
from ...runtime.page_locked import host_empty

ELEMENTS = 2**23  # Elements per job. 10 bytes of each take about 2 ms on PCIe 5, far longer than a kernel's launch.
BUFFERS = 2
ALIGNED = 256  # Bytes, like the allocator's blocks. Kernels load 16 bytes at a time.

LIMIT = 2**30  # Maximum gradient bytes in transfer at once.


class Job(NamedTuple):
    kernel: Callable[[Sequence[torch.Tensor]], Any]  # Called with device copies of `written`, then of `read`.
    written: Sequence[torch.Tensor] = ()
    read: Sequence[torch.Tensor] = ()


def device_bytes(nbytes: int, itemsize: int = 10) -> int:
    """Return the bytes of the device buffers. An element of a parameter has at most 10 bytes of optimizer state."""
    return min(nbytes, BUFFERS * ELEMENTS * itemsize)


def on_way(gradients: int, largest: int) -> int:
    """Return the peak device memory of gradients during a backward, from all ``gradients`` and the ``largest``."""
    return min(gradients, LIMIT + largest)


class HostStream:
    """Runs jobs in order. ``apart``: on a separate CUDA stream, so that the present stream never waits for the bus."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        # On a CPU this is `torch.cpu`, and its streams do nothing.
        self.torch: Any = torch.get_device_module(device)
        self.filling, self.emptying = self.torch.Stream(), self.torch.Stream()
        self._apart = self.torch.Stream() if apart else None
        # Two buffers on the device, each with an event at the end of the last copy from it.
        self._buffers: dict[int, tuple[torch.Tensor, Any]] = {}
        self._turns = itertools.cycle(range(BUFFERS))

    def event(self, stream: Any = None) -> Any:
        event = self.torch.Event()
        event.record(stream or self.torch.current_stream())
        return event

    def copy(self, place: torch.Tensor, tensor: torch.Tensor, stream: Any, after: Any = None) -> Any:
        """Queue a copy on ``stream``, after the present stream's work and ``after``. Return the copy's event."""
        for event in filter(None, (self.event(), after)):
            event.wait(stream)
        with self.torch.stream(stream):
            place.copy_(tensor, non_blocking=True)
        return self.event(stream)

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.push(job)
        self.wait()

    @torch.no_grad()
    def push(self, job: Job, arrived: Any = None) -> None:
        """Queue a job, which reads its host tensors after the event ``arrived``."""
        present = self.torch.current_stream()
        computing, turn, host = self._apart or present, next(self._turns), (*job.written, *job.read)
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in host]
        buffer, emptied = self._buffers.get(turn, (None, None))
        if buffer is None or sum(sizes) > len(buffer):
            if emptied is not None:
                emptied.synchronize()  # for the smaller buffer's memory
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.event(present).wait(self.filling)  # Earlier users of the new buffer's memory are done after this.
        parts = zip(itertools.accumulate([0, *sizes]), host, strict=False)
        tensors = [buffer[start : start + t.nbytes].view(t.dtype).view(t.shape) for start, t in parts]
        for event in filter(None, (emptied, arrived)):
            event.wait(self.filling)
        with self.torch.stream(self.filling):
            for place, tensor in zip(tensors, host, strict=True):
                place.copy_(tensor, non_blocking=True)
        for event in (self.event(self.filling), self.event(present)):
            event.wait(computing)
        with self.torch.stream(computing):
            job.kernel(tensors)
        self.event(computing).wait(self.emptying)
        with self.torch.stream(self.emptying):
            for place, tensor in zip(job.written, tensors, strict=False):
                place.copy_(tensor, non_blocking=True)
        self._buffers[turn] = buffer, self.event(self.emptying)

    def wait(self) -> None:
        self.event(self.emptying).synchronize()
        self._buffers = {}


class HostSums:
    """Gradient sums of one optimizer step, by key, in page-locked host memory. Additions keep the order of the calls,
    so that sums equal device sums bit for bit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = HostStream(device, apart=True)
        self.places: dict[Hashable, torch.Tensor] = {}
        self._arrived: dict[Hashable, Any] = {}  # Event of the last copy to the host.
        # Gradients, each with the event of its copy to the host.
        self._on_way: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()

    def get(self, key: Hashable) -> torch.Tensor | None:
        """Call `settle` first."""
        return self.places[key] if key in self._arrived else None

    def pop(self, key: Hashable) -> torch.Tensor | None:
        return None if self._arrived.pop(key, None) is None else self.places[key]

    @torch.no_grad()
    def add(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Queue an addition. The caller must not change the gradient any more."""
        place = self._place(key, gradient)
        flat, total = gradient.contiguous().view(-1), place.view(-1)
        stream, arrived = self._stream, self._arrived.get(key)
        if arrived is None:
            stream.copy(total, flat, stream.emptying)
        else:
            for piece, part in zip(flat.split(ELEMENTS), total.split(ELEMENTS), strict=True):
                stream.push(Job(lambda sums, piece=piece: sums[0].add_(piece), [part]), arrived)  # type: ignore[misc]
        self._arrived[key] = stream.event(stream.emptying)
        self._on_way.append((self._arrived[key], flat))
        self.let_go(LIMIT)

    def let_go(self, most: int = 0) -> None:
        """Free gradients until at most ``most`` bytes are in transfer. The stream waits, so that memory isn't reused
        early."""
        while sum(tensor.nbytes for _, tensor in self._on_way) > most:
            self._on_way.popleft()[0].wait(self._stream.torch.current_stream())

    def zero(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        self._place(parameter, parameter, dtype).zero_()
        self._arrived[parameter] = self._stream.event(self._stream.emptying)

    def settle(self) -> None:
        self._stream.wait()
        self._on_way.clear()

    def discard(self) -> None:
        self.let_go()
        self._arrived.clear()

    @torch.no_grad()
    def squared_norm(self) -> float:
        norms: list[torch.Tensor] = []
        pieces = [piece for key in self._arrived for piece in self.places[key].view(-1).split(ELEMENTS)]
        norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
        HostStream(self.device).run(Job(lambda read: norms.append(norm(read[0])), read=[piece]) for piece in pieces)
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def _place(self, key: Hashable, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if key not in self.places:
            watchdog.progress()
            self.places[key] = host_empty(like.shape, dtype or like.dtype, self.device)
        return self.places[key]
