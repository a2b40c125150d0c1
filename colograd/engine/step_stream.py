"""vLLM's steps on a stream of high priority, so that what is queued between two of them gives way (`overlap`).

CUDA's default stream, on which the policy trains, has the lowest priority that there is: what is to come second stays
where it is, and the engine moves. A captured graph runs with the priority of the stream on which it was captured, as
torch instantiates graphs; and vLLM keeps the stream that is current at its first step. So an engine is built on its
stream, streams that it makes for itself have its priority, and each of its steps runs there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .building import replaced

PRIORITY = -1  # above the 0 of all other streams
IDLE = 2**28  # bytes of the allocator's cache that are worth the wait in which they are freed
USUAL_POOL = (0, 0)  # other pools are those of captured graphs, and keep their memory


class StepStream:
    """The stream of an engine's steps. Made before the engine, on its device."""

    def __init__(self) -> None:
        self.stream: Any = torch.cuda.Stream(priority=PRIORITY)
        self._is_apart = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """While an engine is built."""
        theirs: Any = torch.cuda.Stream

        class Stream(theirs):
            """As torch's, but with the priority where none is asked for. Streams that exist keep theirs."""

            def __new__(cls, device: Any = None, priority: int = PRIORITY, **kwargs: Any) -> Any:
                return super().__new__(cls, device, priority=priority, **kwargs)

        with self.ordered(), torch.cuda.stream(self.stream), replaced(torch.cuda, "Stream", Stream):
            yield

    def take_steps(self, core: Any) -> None:
        """Let each step of vLLM's LLMEngine run on the stream."""
        own = core.step

        def step() -> Any:
            with self.ordered(), torch.cuda.stream(self.stream):
                return own()

        core.step = step

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """In the body the stream goes on after what was queued on the present one before, and that waits for it at the
        end. Inside of `apart` nothing waits."""
        if self._is_apart:
            yield
            return
        present = torch.cuda.current_stream()
        self.stream.wait_stream(present)
        try:
            yield
        finally:
            present.wait_stream(self.stream)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around many steps: the first waits for what was queued before (new weights), and what follows the last for
        all of them. What is queued on the present stream amid them runs beside them."""
        with self.ordered():
            before, self._is_apart = self._is_apart, True
            try:
                yield
            finally:
                self._is_apart = before
        if not self._is_apart:
            self._release()

    def _release(self) -> None:
        """Free the blocks of this stream in the allocator's cache. Training couldn't take them: it would run out of
        memory first, and the allocator would free them then."""
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < IDLE:
            return
        segments: list[Any] = torch.cuda.memory_snapshot()
        idle = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in segments
            if segment["stream"] == self.stream.cuda_stream and segment.get("segment_pool_id", USUAL_POOL) == USUAL_POOL
        )
        if idle >= IDLE:
            torch.cuda.empty_cache()
