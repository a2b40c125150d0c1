"""One run of an agent's program for one row: its key, its limits, and what it asked and was told."""

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

from ..batch import FinishReason, Prompt, Rollout
from ..engine.chat_api import BadRequest, Call, Choice
from ..engine.protocol import Sampled
from .context import ChatFormat, Context, SessionContexts
from .decoding import Work
from .tree import TokenTree


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one session."""

    requests: int  # in all
    at_once: int  # open requests, each with its n completions
    body: int = 32 * 2**20  # bytes of a request


@dataclass(slots=True)
class _Sample:
    """What a request read, and one of its answers."""

    read: list[int]
    wrote: Sampled
    trained: bool


@dataclass(eq=False)
class Session:
    """What the endpoint knows of a program. Its thread and the engine's both call it."""

    prompt: Prompt
    index: int  # in its group
    form: ChatFormat
    limits: Limits
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(32)}")
    turns: list[dict[str, Any]] = field(default_factory=list)  # as reward functions and the log have them
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
        self._asked: Counter[str] = Counter()  # how often each context was asked

    # -- requests

    def begin(self, n: int) -> None:
        """Count a request in.

        Raises:
            BadRequest: the session is over, or has asked enough.
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
        """Count a request out."""
        with self._lock:
            self._open_requests -= n

    def seed_text(self, ids: Sequence[int]) -> str:
        """What tells this request from all others: a digest of its context, and how often that was asked before. So
        requests that are made at the same time may come in any order."""
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()
        with self._lock:
            self._asked[digest] += 1
            return f"{self.index}/{digest}/{self._asked[digest]}"

    def record(
        self, call: Call, context: Context | None, ids: list[int], samples: Sequence[Sampled],
        choices: Sequence[Choice], began: float,
    ) -> None:  # fmt: skip
        """Record what a request was told.

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
        """Messages up to a turn's reply."""
        count = 0
        while after is not None:
            turn = self.turns[after]
            count += len(turn["messages"]) + 1
            after = turn["after"]
        return count

    def _check_open(self) -> None:
        if not self.is_open:
            raise BadRequest(f"this session is over: {self.why_closed}.", 410, "session_over")

    # -- its end

    def close(self, why: str) -> None:
        """End the session: nothing is recorded of it any more."""
        with self._lock:
            if self.is_open:
                self.is_open, self.why_closed = False, why

    def messages(self) -> tuple[dict[str, Any], ...]:
        """The last conversation behind the messages that it began with."""
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
        """All that the session's requests read and wrote, as a tree; without any, a token that isn't trained."""
        # A context is longer than those that it goes on from. So the order doesn't depend on what came first.
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
