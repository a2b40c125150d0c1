"""Sums of gradients in host memory (`offload_gradients`).

Each gradient is added to the step's sum as soon as a backward has computed it, and is then freed on the device.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

import torch

from ...parallel import watchdog
from ...runtime.page_locked import host_empty
from .host_stream import BUFFERS, ELEMENTS, HostStream, Job

LIMIT = 2**30  # Largest number of gradient bytes in transfer at once. With more the backward waits for the bus.


def on_way(gradients: int, largest: int) -> int:
    """Return the peak device memory of gradients during a backward, in bytes, from the bytes of all ``gradients`` and
    of the ``largest`` gradient, which is computed while other gradients are in transfer."""
    return min(gradients, LIMIT + largest)


def buffer_bytes(gradients: int) -> int:
    """Return the device bytes of the buffers for additions to ``gradients`` bytes of gradient sums on the host."""
    return min(gradients, BUFFERS * ELEMENTS * 4)


class HostSums:
    """Gradient sums of one optimizer step, by key, in page-locked host memory that every step reuses. An addition runs
    in parallel to the backward: the sum is copied to the device in pieces, added to, and copied back. Additions to a
    sum run in the order of the calls, so that the sum equals a sum on the device bit for bit."""

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
        """Return the gradient sum of a key like `get`, and forget it."""
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
        """Free gradients of earlier backwards on the device. After a forward their copies to the host have ended."""
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
