"""The tokens of a session as a tree: what its requests read and what the model wrote, shared beginnings once.

    request 1 reads    p p p          and the model writes    a a
    request 2 reads    p p p a a t    and the model writes    b
    request 3 reads    p p s          and the model writes    c         (its context was compacted)

is the prompt p p p with the branches [a a], [t b] behind it, and [s c], which sees the prompt's first two tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import Branch, FinishReason, ModelInput, Rollout


@dataclass(slots=True, eq=False)
class Node:
    """Consecutive tokens, all of which were sampled or none, and what follows them."""

    ids: array[int]
    logprobs: array[float] | None  # None: the model read them
    trained: bool  # sampled with the run's settings
    children: list[Node] = field(default_factory=list)
    number: int | None = None  # of the request that began it by being answered

    def cut(self, length: int) -> None:
        """Keep the first tokens; the others become the only child, with the children so far."""
        logprobs = self.logprobs
        rest = Node(self.ids[length:], None if logprobs is None else logprobs[length:], self.trained, self.children)
        self.ids, self.logprobs = self.ids[:length], None if logprobs is None else logprobs[:length]
        self.children = [rest]


class TokenTree:
    """What one session's requests read and wrote.

    Args:
        prompt: what its first request read.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.places: dict[int, int] = {}  # of a numbered answer in the rollout: where it begins in the completion
        self._roots: list[Node] = []
        self._prompt = array("i", prompt)
        self._read(self._prompt)

    def add(
        self, read: Sequence[int], wrote: Sequence[int], logprobs: Sequence[float], trained: bool = True,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Add a request's tokens, after those of all requests that it goes on from. What it read joins what is there
        already; what the model wrote never does: two samples of equal tokens are two, and each is trained.

        Args:
            logprobs: of the tokens that it wrote, in nats.
            number: by which `places` has the answer.
        """
        children = self._read(array("i", read))
        if len(wrote):
            children.append(Node(array("i", wrote), array("f", logprobs), trained, number=number))

    def _read(self, ids: array[int]) -> list[Node]:
        """Follow or add the tokens of a context; returns what follows it."""
        children, at = self._roots, 0
        while at < len(ids):
            shared, node = max(((_shared(node, ids, at), node) for node in children), key=_first, default=(0, None))
            if node is None or not shared:
                node, shared = Node(ids[at:], None, False), len(ids) - at
                children.append(node)
            elif shared < len(node.ids):
                node.cut(shared)
            children, at = node.children, at + shared
        return children

    def rollout(self, version: int, finish_reason: FinishReason, **further: Any) -> Rollout | None:
        """The session as a rollout whose prompt is what its first request read; None: nothing was sampled."""
        asked, ids, logprobs = self._prompt, array("i"), array("f")
        sampled: list[bool] = []
        branches: list[Branch] = []

        def take(run: Sequence[Node], after: int | None, seen: int) -> int:
            for node in run:
                if node.number is not None:
                    self.places[node.number] = len(ids)
                ids.extend(node.ids)
                logprobs.extend(node.logprobs if node.logprobs is not None else [0.0] * len(node.ids))
                sampled.extend([node.trained] * len(node.ids))
            branches.append(Branch(sum(len(node.ids) for node in run), after, seen))
            return len(branches) - 1

        # Contexts may be thousands of turns deep: no recursion. Of each: nodes, the branch before, the prompt's tokens
        # before (-1: the prompt is behind us).
        todo: list[tuple[Node, int | None, int]] = [(node, None, 0) for node in reversed(self._roots)]
        while todo:
            node, after, seen = todo.pop()
            if seen >= 0 and node.logprobs is None and asked[seen : seen + len(node.ids)] == node.ids:
                seen += len(node.ids)  # a part of the prompt
                todo += [(child, None, seen) for child in reversed(node.children)]
                continue
            run = [node]
            while len(run[-1].children) == 1:
                run += run[-1].children
            branch = take(run, after, max(seen, 0) if after is None else 0)
            todo += [(child, branch, -1) for child in reversed(run[-1].children)]
        if not ids:
            return None
        return Rollout(
            input=ModelInput(tuple(asked)),
            completion_ids=ids,
            sampler_logprobs=torch.frombuffer(logprobs, dtype=torch.float32),
            sampled=torch.tensor(sampled, dtype=torch.bool),
            finish_reason=finish_reason,
            policy_version=version,
            branches=() if branches == [Branch(len(ids), None, len(asked))] else tuple(branches),
            **further,
        )

    @staticmethod
    def nothing(version: int, asked: ModelInput, token: int, **further: Any) -> Rollout:
        """A session that asked nothing of the model: one token, which isn't trained."""
        return Rollout(
            input=asked,
            completion_ids=array("i", [token]),
            sampler_logprobs=torch.zeros(1),
            sampled=torch.zeros(1, dtype=torch.bool),
            finish_reason=FinishReason.ABORT,
            policy_version=version,
            **further,
        )


def _first(pair: tuple[int, Node]) -> int:
    return pair[0]


def _shared(node: Node, ids: array[int], at: int) -> int:
    """How many of a node's tokens ``ids`` has from ``at`` on."""
    own, count = node.ids, min(len(node.ids), len(ids) - at)
    if own[:count] == ids[at : at + count]:
        return count
    low, high = 0, count  # the first low tokens are equal, the first high aren't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if own[:middle] == ids[at : at + middle] else (low, middle)
    return low
