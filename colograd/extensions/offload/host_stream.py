"""Computation on the device with tensors that stay in page-locked host memory.

Jobs use two buffers on the device in turn. While a kernel runs on one buffer and its results return to the host, the
other buffer is filled. So both directions of the bus are busy at once."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...parallel import watchdog
from ...runtime.page_locked import host_empty

ELEMENTS = 2**23  # Elements per job. At 10 bytes each, a copy takes about 2 ms on PCIe 5, longer than a kernel launch.
BUFFERS = 2
ALIGNED = 256  # Tensors in a device buffer begin at multiples of this number of bytes, as kernels may require.

LIMIT = 2**30  # Maximum gradient bytes in transfer at once.


class Job(NamedTuple):
    kernel: Callable[[Sequence[torch.Tensor]], Any]  # Called with device copies of the tensors `written`, then `read`.
    written: Sequence[torch.Tensor] = ()
    read: Sequence[torch.Tensor] = ()


def device_bytes(nbytes: int, itemsize: int = 10) -> int:
    """Return the maximum bytes of the device buffers for jobs on ``nbytes`` in host memory.

    ``itemsize``: bytes per element. The default is AdamW's state of one element of a bfloat16 parameter."""
    return min(nbytes, BUFFERS * ELEMENTS * itemsize)


def on_way(gradients: int, largest: int) -> int:
    """Return the peak bytes of gradients on the device during a backward with `HostSums`.

    ``gradients``: bytes of all gradients. ``largest``: bytes of the largest gradient."""
    return min(gradients, LIMIT + largest)


class HostStream:
    """A queue of jobs, which run in order.

    ``apart``: run kernels on a separate CUDA stream, so that the caller's stream doesn't wait for copies."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        # On a CPU this is `torch.cpu`, and its streams do nothing.
        self.torch: Any = torch.get_device_module(device)
        self.filling, self.emptying = self.torch.Stream(), self.torch.Stream()
        self._apart = self.torch.Stream() if apart else None
        # Two buffers on the device, each with the event of the last copy from it to the host.
        self._buffers: dict[int, tuple[torch.Tensor, Any]] = {}
        self._turns = itertools.cycle(range(BUFFERS))

    def event(self, stream: Any = None) -> Any:
        event = self.torch.Event()
        event.record(stream or self.torch.current_stream())
        return event

    def copy(self, place: torch.Tensor, tensor: torch.Tensor, stream: Any, after: Any = None) -> Any:
        """Queue a copy of ``tensor`` into ``place`` on ``stream``. Return the event of the copy's end.

        The copy waits for the current stream's work, and for the event ``after``."""
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
                emptied.synchronize()  # wait for copies from the smaller buffer, which is freed next
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self.event(present).wait(self.filling)  # The current stream may still use the new buffer's memory.
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
    """Gradient sums of one optimizer step, by key, in page-locked host memory.

    Gradients are added in the order of the calls, so that the sums equal sums on the device bit for bit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = HostStream(device, apart=True)
        self.places: dict[Hashable, torch.Tensor] = {}
        self._arrived: dict[Hashable, Any] = {}  # By key, the event of the last copy of the sum to the host.
        # Gradients that queued work still reads, each with the event of the work's end.
        self._on_way: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()

    def get(self, key: Hashable) -> torch.Tensor | None:
        """Return the sum ``key``, or None if there is no such sum. The values are valid only after `settle`."""
        return self.places[key] if key in self._arrived else None

    def pop(self, key: Hashable) -> torch.Tensor | None:
        return None if self._arrived.pop(key, None) is None else self.places[key]

    @torch.no_grad()
    def add(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Queue the addition of a gradient to the sum ``key``. The caller must not change the gradient afterwards."""
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
        """Drop references to the oldest gradients until at most ``most`` bytes of gradients are left.

        The current stream waits until dropped gradients are added, so that their memory isn't reused too early."""
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
