"""The tokens of a session as a tree: its requests' contexts and the model's answers. Shared beginnings are stored once.

    request 1 reads    p p p          and the model writes    a a
    request 2 reads    p p p a a t    and the model writes    b
    request 3 reads    p p s          and the model writes    c         (its context was compacted)

form the prompt p p p with the branches [a a], [t b] after [a a], and [s c] after the prompt's first two tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...batch import FinishReason, ModelInput, Rollout
from .branches import Branch, Branches


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree: consecutive tokens, either all sampled or all read, and the nodes that follow."""

    ids: array[int]
    logprobs: array[float] | None  # None means that the model read the tokens.
    trained: bool  # Whether the tokens were sampled with the run's settings. Read tokens aren't trained.
    children: list[Node] = field(default_factory=list)
    number: int | None = None  # Number of the answer that begins with this node.


class TokenTree:
    """One session's contexts and answers as a tree of tokens. ``prompt`` is the context that becomes the prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.places: dict[int, int] = {}  # Answer's number -> index of its first token in the completion.
        self._roots: list[Node] = []
        self._prompt = array("i", prompt)
        self._read(self._prompt)

    def add(
        self, read: Sequence[int], wrote: Sequence[int], logprobs: Sequence[float], trained: bool = True,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Add a request's context ``read`` and answer ``wrote``. The requests that it continues must be in the tree.
        Tokens of a context that are already in the tree are shared. Answers are never shared: two equal samples remain
        two answers. ``number`` is the answer's key in `places`."""
        children = self._read(array("i", read))
        if len(wrote):
            children.append(Node(array("i", wrote), array("f", logprobs), trained, number=number))

    def _read(self, ids: array[int]) -> list[Node]:
        """Follow a context's tokens from the root, and add missing tokens. Return the children of the last node."""
        children, at = self._roots, 0
        while at < len(ids):
            lengths = [_shared(node, ids, at) for node in children]
            if shared := max(lengths, default=0):
                node = children[lengths.index(shared)]
                if shared < len(node.ids):
                    logprobs = node.logprobs  # Split the node: its unshared tokens become its only child.
                    rest = Node(node.ids[shared:], logprobs and logprobs[shared:], node.trained, node.children)
                    node.ids, node.logprobs, node.children = node.ids[:shared], logprobs and logprobs[:shared], [rest]
            else:
                node, shared = Node(ids[at:], None, False), len(ids) - at
                children.append(node)
            children, at = node.children, at + shared
        return children

    def rollout(self, version: int, reason: FinishReason, **further: Any) -> Rollout | None:
        """Return the session as a rollout, and set `places`. Return None if the tree has no tokens but the prompt's."""
        asked, ids, logprobs = self._prompt, array("i"), array("f")
        sampled: list[bool] = []
        branches: list[Branch] = []

        # A loop in place of recursion, because contexts may be thousands of turns deep. An entry holds a node, the
        # index of the branch before the node, and the number of prompt tokens before the node (-1 behind a branch).
        todo: list[tuple[Node, int | None, int]] = [(node, None, 0) for node in reversed(self._roots)]
        while todo:
            node, after, seen = todo.pop()
            if seen >= 0 and node.logprobs is None and asked[seen : seen + len(node.ids)] == node.ids:
                seen += len(node.ids)  # The node's tokens are tokens of the prompt.
                todo += [(child, None, seen) for child in reversed(node.children)]
                continue
            run = [node]
            while len(run[-1].children) == 1:
                run += run[-1].children
            branches.append(Branch(sum(len(each.ids) for each in run), after, max(seen, 0) if after is None else 0))
            for each in run:
                if each.number is not None:
                    self.places[each.number] = len(ids)
                ids.extend(each.ids)
                logprobs.extend(each.logprobs if each.logprobs is not None else [0.0] * len(each.ids))
                sampled.extend([each.trained] * len(each.ids))
            todo += [(child, len(branches) - 1, -1) for child in reversed(run[-1].children)]
        if not ids:
            return None
        if branches != [Branch(len(ids), None, len(asked))]:
            further["riders"] = (Branches(tuple(branches)),)
        values = torch.frombuffer(logprobs, dtype=torch.float32), torch.tensor(sampled, dtype=torch.bool)
        return Rollout(ModelInput(tuple(asked)), ids, *values, reason, version, **further)


def _shared(node: Node, ids: array[int], at: int) -> int:
    """Return how many first tokens of a node equal the tokens of ``ids`` from index ``at`` on."""
    own, count = node.ids, min(len(node.ids), len(ids) - at)
    if own[:count] == ids[at : at + count]:
        return count
    return next(index for index in range(count) if own[index] != ids[at + index])
