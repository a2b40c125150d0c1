"""Requests from the endpoint's thread to the engine. The engine's own thread runs them between its steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling
from .engine.chat_api import BadRequest


@dataclass(eq=False, slots=True)
class Work:
    """A request of a session. Its ``future`` belongs to the endpoint's event loop.

    ``more``, unless None, is called in that loop with all tokens so far, whenever new tokens come.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    more: Callable[[list[int]], object] | None = None
    future: asyncio.Future[list[Sampled]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def finish(self, samples: list[Sampled]) -> None:
        self.tell(lambda: None if self.future.done() else self.future.set_result(samples))

    def fail(self, error: BaseException) -> None:
        self.tell(lambda: None if self.future.done() else self.future.set_exception(error))

    def tell(self, then: Callable[..., object], *arguments: object) -> None:
        """Call a function in the endpoint's event loop."""
        loop = self.future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(then, *arguments)


class WorkQueue:
    """New requests for the engine, and dropped requests, which nobody waits for any more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[Work] = []
        self._dropped: list[Work] = []
        self._woken = False

    def put(self, work: Work) -> None:
        with self._changed:
            self._new.append(work)
            self.wake()

    def drop(self, work: Work) -> None:
        with self._changed:
            self._dropped.append(work)
            self.wake()

    def wake(self) -> None:
        """Make `wait` return."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait for a new request, a dropped request or `wake`, for at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken, seconds)
            self._woken = False

    def take(self) -> tuple[list[Work], list[Work]]:
        """Return the new requests and the dropped requests since the last call."""
        with self._changed:
            new, dropped = self._new, self._dropped
            self._new, self._dropped = [], []
        return [work for work in new if work not in dropped], [work for work in dropped if work not in new]


class Decoder:
    """Runs the requests of a `WorkQueue` in an engine, in the thread that owns the engine."""

    def __init__(self, engine: Engine, queue: WorkQueue) -> None:
        self.engine, self.queue = engine, queue
        self._running: dict[str, Work] = {}

    def step(self, idle_seconds: float) -> None:
        """Submit new requests, run one step, and answer the finished requests. Without requests, wait briefly."""
        new, dropped = self.queue.take()
        if gone := [name for name, work in self._running.items() if work in dropped]:
            for name in gone:
                del self._running[name]
            self.engine.abort(gone)
        for work in new:
            try:
                name = self.engine.submit(work.prompt, work.sampling, work.seed, streams=work.more is not None)
                self._running[name] = work
            except Exception as error:  # not every version of vLLM raises ValueError for invalid requests
                work.fail(BadRequest(f"the engine refuses the request: {error}"))
        if not self._running:
            self.queue.wait(idle_seconds)
            return
        finished_requests = self.engine.advance()
        for name, ids in self.engine.written():
            if (running := self._running.get(name)) is not None and running.more is not None:
                running.tell(running.more, list(ids))
        for name, samples in finished_requests:
            if (finished := self._running.pop(name, None)) is not None:
                finished.finish(samples)

    def close(self) -> None:
        """Abort the running requests."""
        self.engine.abort([*self._running])
        self._running.clear()
