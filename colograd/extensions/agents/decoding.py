"""`WorkQueue`: passes requests from the endpoint's thread to the engine's thread, which runs them between steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling
from .engine.chat_api import BadRequest


@dataclass(eq=False, slots=True)
class Work:
    """A session's request to the engine. ``future`` belongs to the endpoint's event loop.

    If ``more`` isn't None, the event loop calls it with all sampled tokens whenever there are new tokens.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    more: Callable[[list[int]], object] | None = None
    future: asyncio.Future[list[Sampled]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_dropped: bool = False  # Whether the session no longer waits for an answer.

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
    """Requests to an engine. Any thread may add requests. The thread that owns the engine runs them in `step`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._new: deque[Work] = deque()
        self._changed = threading.Event()
        self._running: dict[str, Work] = {}

    def put(self, work: Work) -> None:
        self._new.append(work)
        self.wake()

    def drop(self, work: Work) -> None:
        work.is_dropped = True
        self.wake()

    def wake(self) -> None:
        """End the wait of an idle `step`."""
        self._changed.set()

    def step(self, idle_seconds: float) -> None:
        """Submit new requests, run one engine step, and answer finished requests. Without requests, wait briefly."""
        self._changed.clear()
        if dropped := [name for name, work in self._running.items() if work.is_dropped]:
            self.engine.abort(dropped)
            self._running = {name: work for name, work in self._running.items() if name not in dropped}
        for work in [self._new.popleft() for _ in range(len(self._new))]:
            if work.is_dropped:
                continue
            try:
                name = self.engine.submit(work.prompt, work.sampling, work.seed, streams=work.more is not None)
                self._running[name] = work
            except Exception as error:  # not every version of vLLM raises ValueError for invalid requests
                work.fail(BadRequest(f"the engine refuses the request: {error}"))
        if not self._running:
            self._changed.wait(idle_seconds)
            return
        finished_requests = self.engine.advance()
        for name, ids in self.engine.written():
            if (running := self._running.get(name)) is not None and running.more is not None:
                running.tell(running.more, list(ids))
        for name, samples in finished_requests:
            if (finished := self._running.pop(name, None)) is not None:
                finished.finish(samples)

    def close(self) -> None:
        """Abort all running requests."""
        self.engine.abort([*self._running])
        self._running.clear()
