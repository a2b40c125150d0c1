"""Sums of gradients in host memory (`offload_gradients`): each is added to the step's as soon as a backward has made
it, and is then freed on the device."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..parallel import watchdog
from ..runtime.host_stream import BUFFERS, ELEMENTS, HostStream, Job
from ..runtime.page_locked import host_empty

LIMIT = 2**30  # bytes of gradients on their way at once: with more the backward waits for the bus


def on_way(gradients: int, largest: int) -> int:
    """Bytes that gradients of ``gradients`` bytes take on the device at once while layers go backward: those on their
    way, and the one of ``largest`` bytes that is made meanwhile."""
    return min(gradients, LIMIT + largest)


def buffer_bytes(gradients: int) -> int:
    """Bytes of sums on their way to the device and back."""
    return min(gradients, BUFFERS * ELEMENTS * 4)


class HostSums:
    """Sums by key in page-locked host memory, which is kept from step to step. An addition is two copies and a kernel,
    beside the backward: the sum comes to the device, in pieces, and goes back. Additions to a sum have the order in
    which they were asked for, so that it has the bits of one that stays on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = HostStream(device, apart=True)
        self._places: dict[Hashable, torch.Tensor] = {}
        self._arrived: dict[Hashable, Any] = {}  # of the present step's sums, when the last copy is on the host
        self._on_way: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()

    def __contains__(self, key: Hashable) -> bool:
        """Whether something was added in this step."""
        return key in self._arrived

    def get(self, key: Hashable) -> torch.Tensor | None:
        """The sum, after `settle`; None: nothing was added in this step."""
        return self._places[key] if key in self else None

    def keep_at(self, key: Hashable, place: torch.Tensor) -> None:
        """Let a sum have this host memory."""
        self._places[key] = place

    @torch.no_grad()
    def add(self, key: Hashable, gradient: torch.Tensor) -> None:
        """Queue an addition. The gradient must not change any more."""
        place = self._place(key, gradient)
        own, whole = gradient.contiguous().view(-1), place.view(-1)
        stream, made = self._stream, self._stream.event()
        if (arrived := self._arrived.get(key)) is None:
            stream.send(whole, own, made)
        else:
            for piece, part in zip(own.split(ELEMENTS), whole.split(ELEMENTS), strict=True):
                stream.push(Job(_addition(piece), [part]), made, arrived)
        self._arrived[key] = stream.sent()
        self._on_way.append((self._arrived[key], own))
        while sum(tensor.nbytes for _, tensor in self._on_way) > LIMIT:
            event, _ = self._on_way.popleft()
            stream.let_wait(event)

    def let_go(self) -> None:
        """Free gradients of earlier backwards on the device. A forward later they have arrived: nothing waits."""
        while self._on_way:
            self._stream.let_wait(self._on_way.popleft()[0])

    def zero(self, key: Hashable, like: torch.Tensor, dtype: torch.dtype) -> None:
        """Make a sum 0, after `settle`."""
        self._place(key, like, dtype).zero_()
        self._arrived[key] = self._stream.sent()

    def settle(self) -> None:
        """The host waits until all sums are there."""
        self._stream.wait()
        self._on_way.clear()

    def discard(self) -> None:
        """Forget the sums; their memory stays for the next step's."""
        self.let_go()
        self._arrived.clear()

    def forget(self, key: Hashable) -> None:
        """Forget a sum."""
        self._arrived.pop(key, None)

    @torch.no_grad()
    def squared_norm(self) -> float:
        """The sum of all squares, in float64, after `settle`."""
        norms: list[torch.Tensor] = []
        pieces = [piece for key in self._arrived for piece in self._places[key].view(-1).split(ELEMENTS)]

        def measure(tensors: Any) -> None:
            norms.append(torch.linalg.vector_norm(tensors[0], dtype=torch.float64))

        HostStream(self.device).run(Job(measure, read=[piece]) for piece in pieces)
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def _place(self, key: Hashable, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        place = self._places.get(key)
        if place is None:
            watchdog.progress()
            place = self._places[key] = host_empty(like.shape, dtype or like.dtype, self.device)
        return place


def _addition(piece: torch.Tensor) -> Callable[[Sequence[torch.Tensor]], None]:
    def add(sums: Sequence[torch.Tensor]) -> None:
        sums[0].add_(piece)

    return add
