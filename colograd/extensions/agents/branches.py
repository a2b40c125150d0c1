"""The branches of a completion that is a tree, such as an agent's session with several contexts.

In a packed row each branch is a segment. It attends to the branches that it continues and to a prefix of the prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from ...batch import MicroBatch, PackedRow, Rollout, SegmentLayout
from ...policy.sending import to_device_async
from ...riders import Rider, RowRider, Segment


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive tokens of a completion that is a tree, such as an agent's session with several contexts.

    The branches lie one after the other in `Rollout.completion_ids`; a parent lies before its children. In this
    example the agent called the model with the whole prompt 11 12 13 (branch 0) and continued that context (branch 1).
    Then the agent called the model with only the prompt's first two tokens (branch 2):

        completion_ids   21 22 | 31 32 | 41 42
        branches         Branch(2, prompt=3), Branch(2, after=0), Branch(2, prompt=2)
    """

    length: int  # Number of tokens in the branch.
    after: int | None = None  # Index of the parent branch. None means that the prompt is the parent.
    prompt: int = 0  # Number of prompt tokens that the branch attends to, if the prompt is its parent.


@dataclass(frozen=True, slots=True)
class Branches(Rider):
    """Rider (data that travels with a rollout): the branches of its completion. Other completions aren't trees."""

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
    """Return a rollout's branches, or () if it isn't a tree."""
    rider = rollout.get(Branches)
    return () if rider is None else rider.branches


class End(NamedTuple):
    """End of a segment (a prompt or branch) of a row, where a following segment can continue."""

    path: tuple[int, ...]  # Indices of the segments from the prompt's first segment up to this segment.
    tokens: int  # Number of tokens in the segments of `path`.
    place: int  # Index in the row of this segment's last token.


@dataclass(frozen=True, slots=True, eq=False)
class RowBranches(RowRider):
    """The layout of a row with trees. `applied` divides its prompts and completions into the branches' segments."""

    parts: list[tuple[int, list[tuple[Branch, ...]]]]  # Per prompt: number of tokens, branches of each completion.

    def applied(self, row: MicroBatch) -> MicroBatch:
        """Return the row with a segment per branch. The first token of a branch is predicted at the last token that the
        branch continues (of a branch or the prompt). The order of the tokens doesn't change."""
        position_ids, logit_positions = list[torch.Tensor](), list[torch.Tensor]()
        lengths, attends_to = list[int](), list[tuple[int, ...]]()
        at = 0  # Number of the row's tokens laid out so far.

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
            ends = {0: End((), 0, at)}  # `ends`: number of prompt tokens -> `End` after this prefix of the prompt.
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
