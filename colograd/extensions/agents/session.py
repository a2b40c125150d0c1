"""`Session`: one run of an agent's program. `WorkQueue`: brings sessions' requests to the engine's thread."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch

from ...batch import FinishReason, Prompt, Rollout
from ...config import GRPOConfig
from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling
from ...usercode.calls import Outcome
from .branches import TokenTree
from .context import ChatFormat, Context, SessionContexts
from .engine.chat_api import BadRequest, Call, Choice
from .programs import CommandProgram, FunctionProgram


@dataclass(eq=False, slots=True)
class Work:
    """A request to the engine. `WorkQueue` drops the request if ``future`` is cancelled or failed."""

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    future: Future[list[Sampled]] = field(default_factory=Future)

    def finish(self, result: list[Sampled] | Exception) -> None:
        with contextlib.suppress(InvalidStateError):  # Another thread has finished or cancelled the future.
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class WorkQueue:
    """Requests to an engine. Any thread may call `put` and `wake`. Only the engine's thread may call `step`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._new: deque[Work] = deque()
        self._changed = threading.Event()
        self._running: dict[str, Work] = {}

    def put(self, work: Work) -> None:
        self._new.append(work)
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    def step(self, idle_seconds: float) -> None:
        """Run one engine step. If there are no requests, wait for one, at most ``idle_seconds``."""
        self._changed.clear()
        if dropped := [name for name, work in self._running.items() if work.future.done()]:
            self.engine.abort(dropped)
            self._running = {name: work for name, work in self._running.items() if name not in dropped}
        for work in [self._new.popleft() for _ in range(len(self._new))]:
            if work.future.done():
                continue
            try:
                self._running[self.engine.submit(work.prompt, work.sampling, work.seed)] = work
            except Exception as error:  # vLLM raises several types of errors for an invalid request.
                work.finish(BadRequest(f"the engine refuses the request: {error}"))
        if not self._running:
            self._changed.wait(idle_seconds)
            return
        for name, samples in self.engine.advance():
            if (finished := self._running.pop(name, None)) is not None:
                finished.finish(samples)

    def close(self) -> None:
        self.engine.abort([*self._running])
        self._running.clear()


class Session:
    """One run of an agent's program. The HTTP endpoint's and the engine's threads call its methods."""

    program: CommandProgram | FunctionProgram

    def __init__(
        self, prompt: Prompt, index: int, form: ChatFormat, config: GRPOConfig, is_repeated: bool = False
    ) -> None:
        self.prompt, self.index, self.form, self.config = prompt, index, form, config
        self.is_repeated = is_repeated  # Whether this run repeats a run whose command a signal ended.
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.turns: list[dict[str, Any]] = []  # One dict per answer of the model, in order.
        self.why_closed = ""  # Why the session is over, or "" for a running session.
        self.began = time.perf_counter()
        self.contexts = SessionContexts(form)
        self.working: set[Work] = set()
        self._lock = threading.Lock()
        self._requests = self._open_requests = 0
        self._samples: list[tuple[list[int], Sampled, bool]] = []  # (context's ids, answer, whether it is trained)
        self._requests_of: Counter[str] = Counter()  # Number of requests by the context's digest.

    def begin(self, n: int) -> None:
        with self._lock:
            if self.why_closed:
                raise self.over()
            most, total = self.config.agent_requests, self._open_requests + n
            if self._requests >= most:
                told = f"this session has made {most} requests, as many as agent_requests allows: raise it in the run."
                raise BadRequest(told, 403, "session_limit")
            if total > (most := self.config.agent_parallel):
                told = f"{total} completions would be open, but agent_parallel allows {most}: wait for answers first."
                raise BadRequest(told, 429, "too_many_requests")
            self._requests, self._open_requests = self._requests + 1, total

    def outcome(self) -> Outcome | None:
        """Return the program's outcome if it ended, the outcome "late" if `agent_timeout` is over, else None."""
        if self.program.future.done():
            return self.program.future.result()
        limit = self.config.agent_timeout
        is_late = limit is not None and time.perf_counter() > self.began + limit
        return Outcome("late", None, limit or 0.0) if is_late else None

    def end(self, n: int) -> None:
        with self._lock:
            self._open_requests -= n

    def seed_text(self, ids: Sequence[int]) -> str:
        """Return the text that a request's seed is derived from. Apart from the session's index, the text depends
        only on ``ids`` (the context's tokens) and on how many earlier requests of the session had the same ``ids``."""
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()
        with self._lock:
            self._requests_of[digest] += 1
            return f"{self.index}/{digest}/{self._requests_of[digest]}"

    def record(
        self, call: Call, context: Context | None, ids: list[int], samples: Sequence[Sampled],
        choices: Sequence[Choice], began: float,
    ) -> None:  # fmt: skip
        with self._lock:
            if self.why_closed:
                raise self.over()
            for sample, choice in zip(samples, choices, strict=True):
                self.contexts.add(context, sample.ids, choice.message, choice.stop is None)
                self._samples.append((ids, sample, not call.shaping))
                after, messages = (None, []) if context is None else (context.after, context.messages)
                known = sum(len(turn["messages"]) + 1 for turn in self._path(after))
                turn: dict[str, Any] = {"after": after, "messages": messages[known:], "reply": choice.message}
                turn |= {"finish": choice.finish_reason, "prompt_tokens": len(ids), "tokens": len(sample.ids)}
                seconds = {"began": round(began - self.began, 3), "seconds": round(time.perf_counter() - began, 3)}
                self.turns.append({**turn, "trained": not call.shaping, **seconds})

    def _path(self, number: int | None) -> list[dict[str, Any]]:
        """Return the turns of the conversation that ends with the turn of index ``number``."""
        path = []
        while number is not None:
            path.append(self.turns[number])
            number = path[-1]["after"]
        return path[::-1]

    def over(self) -> BadRequest:
        return BadRequest(f"this session is over: {self.why_closed}.", 410, "session_over")

    def close(self, why: str) -> None:
        with self._lock:
            self.why_closed = self.why_closed or why

    def rollout(self, version: int, columns: dict[str, Any]) -> Rollout:
        messages: list[dict[str, Any]] = []
        for place, turn in enumerate(self._path(len(self.turns) - 1 if self.turns else None)):
            messages += [*(turn["messages"] if place else ()), turn["reply"]]
        further: dict[str, Any] = {"messages": tuple(messages), "columns": columns}
        # Sorted, so that a context comes before its continuations. The order in time has no influence.
        numbered = sorted(enumerate(self._samples), key=lambda s: (len(s[1][0]), s[1][0], list(s[1][1].ids)))
        tree = TokenTree(numbered[0][1][0] if numbered else [])
        for number, (read, wrote, trained) in numbered:
            tree.add(read, wrote.ids, wrote.logprobs, trained, number)
        truncated = bool(self.turns) and self.turns[-1]["finish"] == "length"
        rollout = tree.rollout(version, FinishReason.LENGTH if truncated else FinishReason.STOP, **further)
        for number, turn in enumerate(self.turns):
            turn["at"] = tree.places.get(number, 0)  # Index of the turn's first token in the completion.
        # A completion needs a token, so a session without tokens gets an end token.
        ids = array("i", [min(self.form.ends, default=0)])
        nothing = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
        return rollout or Rollout(self.prompt.input, ids, *nothing, FinishReason.ABORT, version, **further)
