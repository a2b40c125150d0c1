"""A high-priority CUDA stream for vLLM's steps, so that training work queued between steps gives way (`overlap`).

The policy trains on CUDA's default stream, which has the lowest priority. So training stays there, and the engine gets
a stream of higher priority. A CUDA graph, as torch instantiates it, runs with the priority of the stream that captured
it. vLLM keeps the stream that is current at its first step. So the engine is built on its stream, the streams that it
makes get the same priority, and each of its steps runs there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ....config import GRPOConfig
from ....engine.building import replaced
from ....engine.feature import BuiltEngine, EngineFeature, EngineUse

PRIORITY = -1  # other streams have 0; lower numbers go first
IDLE = 2**28  # minimum of cached bytes to free; fewer aren't worth the wait
USUAL_POOL = (0, 0)  # id of the default memory pool; the pools of CUDA graphs keep their memory


class StepStream(EngineFeature):
    """The stream of an engine's steps. Create it before the engine, on the engine's device."""

    def __init__(self) -> None:
        self.stream: Any = torch.cuda.Stream(priority=PRIORITY)
        self._is_apart = False

    @contextlib.contextmanager
    def while_built(self) -> Iterator[None]:
        """Build an engine on the stream, while the context lasts.

        vLLM must have been imported before, because it tracks the current stream from its import on.
        """
        theirs: Any = torch.cuda.Stream

        class Stream(theirs):
            """torch's stream with this priority by default. Existing streams keep their priority."""

            def __new__(cls, device: Any = None, priority: int = PRIORITY, **kwargs: Any) -> Any:
                return super().__new__(cls, device, priority=priority, **kwargs)

        with self.ordered(), torch.cuda.stream(self.stream), replaced(torch.cuda, "Stream", Stream):
            yield

    def built(self, engine: BuiltEngine) -> None:
        """Run each step of the engine on the stream."""
        core = engine.core
        own = core.step

        def step() -> Any:
            with self.ordered(), torch.cuda.stream(self.stream):
                return own()

        core.step = step

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Let the stream wait for the current one at the start, and the current one for the stream at the end.

        Inside of `while_generating` nothing waits.
        """
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
    def while_generating(self) -> Iterator[None]:
        """Run many steps concurrently with work that is queued on the current stream between them.

        The first step waits for earlier work of the current stream, such as new weights. After the last step the
        current stream waits for all steps.
        """
        with self.ordered():
            before, self._is_apart = self._is_apart, True
            try:
                yield
            finally:
                self._is_apart = before
        if not self._is_apart:
            self._release()

    def _release(self) -> None:
        """Free the stream's blocks in the allocator's cache.

        Training can't reuse them: the allocator frees them only when training runs out of memory.
        """
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


def step_stream(config: GRPOConfig, use: EngineUse) -> StepStream | None:
    """Offer a `StepStream` on a GPU, if the rank trains between the engine's steps."""
    return StepStream() if config.overlap != "off" and not (config.on_cpu or config.why_not_between_steps) else None
