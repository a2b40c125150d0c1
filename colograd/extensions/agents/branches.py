"""Completions that are trees, such as an agent's session with several contexts. Each branch is a segment of a row.

    request 1 reads    p p p          and the model writes    a a
    request 2 reads    p p p a a t    and the model writes    b
    request 3 reads    p p s          and the model writes    c         (its context was compacted)

form the prompt p p p with the branches [a a], [t b] after [a a], and [s c] after the prompt's first two tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from ...batch import FinishReason, MicroBatch, ModelInput, PackedRow, Rollout, SegmentLayout
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider, Segment


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive tokens of a completion that continue the prompt or a parent branch.

    A parent lies before its children in `Rollout.completion_ids`:

    completion_ids   a a | t b | s c
    branches         Branch(2, prompt=3), Branch(2, after=0), Branch(2, prompt=2)
    """

    length: int
    after: int | None = None  # Index of the parent branch. None: the branch continues the prompt.
    prompt: int = 0  # Number of the prompt's first tokens that the branch continues. 0 if `after` is set.


@dataclass(frozen=True, slots=True)
class Branches(Rider):
    branches: tuple[Branch, ...]

    KEY = "branches"

    def segments(self) -> tuple[Segment, ...]:
        contexts, parents = list[int](), {branch.after for branch in self.branches}
        for branch in self.branches:
            parent = branch.after
            contexts.append(branch.prompt if parent is None else contexts[parent] + self.branches[parent].length)
        pairs = enumerate(zip(contexts, self.branches, strict=True))
        return tuple(Segment(context, branch.length, index not in parents) for index, (context, branch) in pairs)

    @classmethod
    def of_row(cls, row: PackedRow) -> RowBranches:
        def of(rollout: Rollout) -> tuple[Branch, ...]:
            whole = Branch(len(rollout.completion_ids), prompt=len(rollout.input))
            return branches_of(rollout) or (whole,)

        return RowBranches([(len(part.rollouts[0].input), [*map(of, part.rollouts)]) for part in row.parts])

    def to_json(self) -> Any:
        return [dataclasses.astuple(branch) for branch in self.branches]

    @classmethod
    def from_json(cls, value: Any, rollout: Rollout) -> Self:
        tree = tuple(Branch(int(length), after, int(prompt)) for length, after, prompt in value)
        assert sum(branch.length for branch in tree) == len(rollout.completion_ids), "branches don't fit"
        return cls(tree)


def branches_of(rollout: Rollout) -> tuple[Branch, ...]:
    rider = rollout.get(Branches)
    return () if rider is None else rider.branches


class End(NamedTuple):
    path: tuple[int, ...]  # Indices of the segments from the prompt's first segment up to this segment.
    tokens: int  # Number of tokens in the segments of `path`.
    place: int  # Index of the segment's last token in the row.


@dataclass(frozen=True, slots=True, eq=False)
class RowBranches(RowRider):
    parts: list[tuple[int, list[tuple[Branch, ...]]]]  # Per prompt: (number of its tokens, each completion's branches).

    def applied(self, row: MicroBatch) -> MicroBatch:
        """Return the row with one segment per branch. The order of the row's tokens doesn't change."""
        position_ids, logit_positions = list[torch.Tensor](), list[torch.Tensor]()
        lengths, attends_to = list[int](), list[tuple[int, ...]]()
        at = 0

        def add(count: int, before: End) -> End:
            nonlocal at
            position_ids.append(torch.arange(before.tokens, before.tokens + count))
            attends_to.append(before.path)
            lengths.append(count)
            at += count
            return End((*before.path, len(lengths) - 1), before.tokens + count, at - 1)

        for prompt, completions in self.parts:
            # Split the prompt into segments wherever a branch continues only the prompt's first tokens.
            cuts = {branch.prompt for branches in completions for branch in branches if branch.after is None}
            ends = {0: End((), 0, at)}  # Ends of the prompt's segments, by number of prompt tokens up to there.
            for first, last in itertools.pairwise((0, *sorted(cuts - {0, prompt}), prompt)):
                ends[last] = add(last - first, ends[first])
            for branches in completions:
                tree: list[End] = []
                for branch in branches:
                    before = ends[branch.prompt] if branch.after is None else tree[branch.after]
                    logit_positions += [torch.tensor([before.place]), torch.arange(at, at + branch.length - 1)]
                    tree.append(add(branch.length, before))
        places, device = torch.cat(logit_positions), row.input_ids.device
        return dataclasses.replace(
            row,
            position_ids=to_device_async(torch.cat(position_ids)[None], device),
            logit_positions=to_device_async(places, device),
            layout=SegmentLayout(tuple(lengths), tuple(attends_to)),
            riders=tuple(rider for rider in row.riders if rider is not self),
            host_positions=places,
        )


@dataclass(slots=True, eq=False)
class Node:
    """Consecutive tokens of a session, all sampled or all read by the model, and the nodes that continue them."""

    ids: array[int]
    logprobs: array[float] | None  # None: the model only read the tokens.
    trained: bool
    children: list[Node] = field(default_factory=list)
    number: int | None = None  # Index of the session's answer that begins with this node.


class TokenTree:
    """One session's contexts and answers as a tree of tokens. The context ``prompt`` becomes the rollout's prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.places: dict[int, int] = {}  # Answer's index in the session -> index of its first token in the completion.
        self._roots: list[Node] = []
        self._prompt = array("i", prompt)
        self._read(self._prompt)

    def add(
        self, read: Sequence[int], wrote: Sequence[int], logprobs: Sequence[float], trained: bool = True,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Add a request's context ``read`` and answer ``wrote``. ``number`` is the answer's index in the session.

        The requests that this request continues must be added earlier. Contexts share their common first tokens. Two
        equal answers to a context remain two nodes."""
        children = self._read(array("i", read))
        if len(wrote):
            children.append(Node(array("i", wrote), array("f", logprobs), trained, number=number))

    def _read(self, ids: array[int]) -> list[Node]:
        """Add a context's tokens that the tree lacks. Return the children of the context's last node."""
        children, at = self._roots, 0
        while at < len(ids):
            lengths = [_shared(node, ids, at) for node in children]
            if shared := max(lengths, default=0):
                node = children[lengths.index(shared)]
                if shared < len(node.ids):  # Split the node: its unshared tokens become its only child.
                    logprobs = node.logprobs
                    rest = Node(node.ids[shared:], logprobs and logprobs[shared:], node.trained, node.children)
                    node.ids, node.logprobs, node.children = node.ids[:shared], logprobs and logprobs[:shared], [rest]
            else:
                node, shared = Node(ids[at:], None, False), len(ids) - at
                children.append(node)
            children, at = node.children, at + shared
        return children

    def rollout(self, version: int, reason: FinishReason, **further: Any) -> Rollout | None:
        """Return the tree as a rollout, or None if the tree has only the prompt's tokens."""
        prompt, ids, logprobs = self._prompt, array("i"), array("f")
        sampled: list[bool] = []
        branches: list[Branch] = []

        # A stack instead of recursion, because sessions may have thousands of turns. Its entries: (node, index of the
        # node's parent branch or None, number of prompt tokens before the node or -1 behind a branch).
        todo: list[tuple[Node, int | None, int]] = [(node, None, 0) for node in reversed(self._roots)]
        while todo:
            node, after, start = todo.pop()
            if start >= 0 and node.logprobs is None and prompt[start : start + len(node.ids)] == node.ids:
                todo += [(child, None, start + len(node.ids)) for child in reversed(node.children)]
                continue
            run = [node]
            while len(run[-1].children) == 1:
                run += run[-1].children
            branches.append(Branch(sum(len(each.ids) for each in run), after, max(start, 0)))
            for each in run:
                if each.number is not None:
                    self.places[each.number] = len(ids)
                ids.extend(each.ids)
                logprobs.extend(each.logprobs if each.logprobs is not None else [0.0] * len(each.ids))
                sampled.extend([each.trained] * len(each.ids))
            todo += [(child, len(branches) - 1, -1) for child in reversed(run[-1].children)]
        if not ids:
            return None
        if branches != [Branch(len(ids), None, len(prompt))]:
            further["riders"] = (Branches(tuple(branches)),)
        values = torch.frombuffer(logprobs, dtype=torch.float32), torch.tensor(sampled, dtype=torch.bool)
        return Rollout(ModelInput(tuple(prompt)), ids, *values, reason, version, **further)


def _shared(node: Node, ids: array[int], at: int) -> int:
    count = min(len(node.ids), len(ids) - at)
    if node.ids[:count] == ids[at : at + count]:  # Comparing slices is faster than the loop below.
        return count
    return next(index for index in range(count) if node.ids[index] != ids[at + index])
