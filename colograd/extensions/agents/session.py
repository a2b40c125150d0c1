"""One run of an agent's program for one row: its key, its limits, its requests and their answers."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...batch import FinishReason, Prompt, Rollout
from ...engine.protocol import Sampled
from .context import ChatFormat, Context, SessionContexts
from .decoding import Work
from .engine.chat_api import BadRequest, Call, Choice
from .tree import TokenTree


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one session."""

    requests: int  # maximum number of requests
    at_once: int  # maximum number of open completions; a request counts as its n completions
    body: int = 32 * 2**20  # maximum bytes of a request


@dataclass(slots=True)
class _Sample:
    """The context of a request, and one of its answers."""

    read: list[int]
    wrote: Sampled
    trained: bool


@dataclass(eq=False)
class Session:
    """The state of one run of a program. The endpoint's thread and the engine's thread both call it."""

    prompt: Prompt
    index: int  # index of the completion in its group
    form: ChatFormat
    limits: Limits
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(32)}")
    turns: list[dict[str, Any]] = field(default_factory=list)  # one dict per answer, for reward functions and the log
    is_open: bool = True
    why_closed: str = ""

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.contexts = SessionContexts(self.form)
        self.working: set[Work] = set()
        self._lock = threading.Lock()
        self._requests = 0
        self._open_requests = 0
        self._samples: list[_Sample] = []
        self._asked: Counter[str] = Counter()  # number of requests by context digest

    # -- requests

    def begin(self, n: int) -> None:
        """Count a request with ``n`` completions as open.

        Raises:
            BadRequest: the session is over, or has reached a limit.
        """
        with self._lock:
            self._check_open()
            if self._requests + 1 > self.limits.requests:
                raise BadRequest(
                    f"this session has made {self.limits.requests} requests, which is all that agent_requests allows.",
                    403,
                    "session_limit",
                )
            if self._open_requests + n > self.limits.at_once:
                raise BadRequest(
                    f"this session would have {self._open_requests + n} completions open at once, but may have "
                    f"{self.limits.at_once} (agent_parallel).",
                    429,
                    "too_many_requests",
                )
            self._requests += 1
            self._open_requests += n

    def end(self, n: int) -> None:
        """Count a request with ``n`` completions as closed."""
        with self._lock:
            self._open_requests -= n

    def seed_text(self, ids: Sequence[int]) -> str:
        """Return a text that identifies this request: a digest of its context, and its number among equal contexts.

        So the seeds of concurrent requests don't depend on their order.
        """
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()
        with self._lock:
            self._asked[digest] += 1
            return f"{self.index}/{digest}/{self._asked[digest]}"

    def record(
        self, call: Call, context: Context | None, ids: list[int], samples: Sequence[Sampled],
        choices: Sequence[Choice], began: float,
    ) -> None:  # fmt: skip
        """Record the answers to a request.

        Raises:
            BadRequest: the session is over.
        """
        with self._lock:
            self._check_open()
            for sample, choice in zip(samples, choices, strict=True):
                self.contexts.add(context, sample.ids, choice.message, choice.stop is None)
                self._samples.append(_Sample(ids, sample, not call.shaping))
                after = None if context is None else context.after
                seen = self._seen(after)
                messages = [] if context is None else context.messages
                self.turns.append(
                    {
                        "after": after,
                        "messages": messages[seen:],
                        "reply": choice.message,
                        "finish": choice.finish_reason,
                        "prompt_tokens": len(ids),
                        "tokens": len(sample.ids),
                        "trained": not call.shaping,
                        "began": round(began - self.began, 3),
                        "seconds": round(time.perf_counter() - began, 3),
                    }
                )

    def _seen(self, after: int | None) -> int:
        """Return the number of messages up to a turn's reply."""
        count = 0
        while after is not None:
            turn = self.turns[after]
            count += len(turn["messages"]) + 1
            after = turn["after"]
        return count

    def _check_open(self) -> None:
        if not self.is_open:
            raise BadRequest(f"this session is over: {self.why_closed}.", 410, "session_over")

    # -- the session's end

    def close(self, why: str) -> None:
        """End the session. No more answers are recorded."""
        with self._lock:
            if self.is_open:
                self.is_open, self.why_closed = False, why

    def messages(self) -> tuple[dict[str, Any], ...]:
        """Return the last conversation, without the messages that it began with."""
        if not self.turns:
            return ()
        path, found = [len(self.turns) - 1], list[dict[str, Any]]()
        while (after := self.turns[path[0]]["after"]) is not None:
            path.insert(0, after)
        for place, number in enumerate(path):
            turn = self.turns[number]
            found += turn["messages"] if place else []
            found.append(turn["reply"])
        return tuple(found)

    def rollout(self, version: int, columns: dict[str, Any]) -> Rollout:
        """Return the session's contexts and answers as a tree. Without answers, return one token that isn't trained."""
        # A context is longer than every context that it continues. So the order doesn't depend on the times.
        numbered = sorted(enumerate(self._samples), key=lambda s: (len(s[1].read), s[1].read, list(s[1].wrote.ids)))
        tree = TokenTree(numbered[0][1].read if numbered else [])
        for number, each in numbered:
            tree.add(each.read, each.wrote.ids, each.wrote.logprobs, each.trained, number)
        truncated = bool(self.turns) and self.turns[-1]["finish"] == "length"
        reason = FinishReason.LENGTH if truncated else FinishReason.STOP
        further: dict[str, Any] = {"messages": self.messages(), "columns": columns}
        found = tree.rollout(version, reason, **further)
        for number, turn in enumerate(self.turns):
            turn["at"] = tree.places.get(number, 0)  # an answer of no tokens has no place
        return found or tree.nothing(version, self.prompt.input, min(self.form.ends, default=0), **further)
