"""A packed row's tokens, shared out among the ranks that train it together (`sequence_parallel_size`).

Each rank computes a range of the row's tokens: their embeddings, norms, linear layers, experts and logits. Attention
needs all keys. Before it the ranks exchange queries, keys and values, so that each has all tokens for a part of the
heads, and after it they exchange the outputs back (DeepSpeed-Ulysses, arXiv 2309.14509). So attention of a row is what
it is on one rank, with its segments, windows and sinks, and a shared prompt is there once over all ranks.

Key-value heads that the ranks don't divide are sent to each rank that needs them. Query heads that they don't divide
are filled up with zeros.

The log-probabilities of all labels are gathered, and every rank computes the same loss of them. In the backward a rank
takes the gradient of its own labels. Then the sum over ranks of a parameter's gradients is its gradient, once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..batch import UNKNOWN, MicroBatch, SegmentLayout
from ..parallel.layout import RankLayout
from ..parallel.shards import RankGroup, group_of
from .exchanges import leave
from .sending import to_device_async

Send = Callable[[torch.Tensor], torch.Tensor]
PACKED = "colograd_packed"  # the attention of packed rows, by its name: see `attention`


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The ranks that train this rank's rows, in the attribute ``row_groups`` of a model. A copy of it has the same."""

    sequence: RankGroup  # with this rank's part of the policy: they share out a row's tokens
    row: RankGroup  # all of them, which may ask whether they meet

    def __deepcopy__(self, memo: Any) -> RowGroups:
        return self

    @classmethod
    def of(cls, layout: RankLayout, engine: RankGroup | None) -> RowGroups:
        """A collective.

        Args:
            engine: the ranks that have a policy in parts; None: each has all of it.
        """
        sequence = group_of(layout, lambda rank: rank.sequence_group, meets=engine is None)
        if engine is None:
            return cls(sequence, sequence)
        row = group_of(layout, lambda rank: rank.row_group, meets=True, exchanges=False)
        counted = engine.exchanged  # of a row's exchanges, whichever of its ranks are in them
        return cls(dataclasses.replace(sequence, exchanged=counted), dataclasses.replace(row, exchanged=counted))


def share_rows(model: Any, groups: RowGroups) -> None:
    """Have the forwards of a model compute this rank's tokens of each packed row alone."""
    model.row_groups = groups


def whole_rows(model: Any) -> None:
    """Undo `share_rows`."""
    if hasattr(model, "row_groups"):
        del model.row_groups


@dataclass(frozen=True, eq=False)
class RowPart:
    """This rank's tokens and labels of a packed row, and those of the ranks it shares the row with.

    A row of 7 tokens on 2 ranks; the label after token 3 is the second one's, whose tokens begin with it:

        tokens           4 3
        logit_positions  1 2 | 1 3 4 5
        own              0 1   2          on the first rank, with labels (4, 2)
                                 3 4 5    on the second
    """

    group: RankGroup
    tokens: tuple[int, ...]  # of each rank
    labels: tuple[int, ...]  # of each rank
    own: torch.Tensor  # (n,) which of the row's N labels this rank computes
    own_on_host: torch.Tensor
    places: torch.Tensor  # (N,) of each label among those of all ranks, each filled up to the most that one has
    fillers: int = 0  # how many of the tokens, at the row's end, are in no sequence: see `_with_a_token_for_each`

    @classmethod
    def of(cls, group: RankGroup, num_tokens: int, positions: torch.Tensor, device: torch.device) -> RowPart:
        """
        Args:
            positions: (N,) `MicroBatch.logit_positions`, in host memory.
        """
        size = group.size
        tokens = tuple(num_tokens // size + (place < num_tokens % size) for place in range(size))
        ends = torch.tensor([*itertools.accumulate(tokens)])
        owner = torch.bucketize(positions, ends, right=True)
        counts = torch.bincount(owner, minlength=size)
        by_owner = owner.argsort(stable=True)
        within = torch.empty_like(owner)
        within[by_owner] = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[by_owner]]
        places = owner * int(counts.max()) + within
        own = (owner == group.place).nonzero().flatten()
        labels = tuple(counts.tolist())
        return cls(group, tokens, labels, to_device_async(own, device), own, to_device_async(places, device))

    @property
    def range(self) -> slice:
        """This rank's tokens in the row."""
        start = sum(self.tokens[: self.group.place])
        return slice(start, start + self.tokens[self.group.place])

    def cut(self, row: MicroBatch) -> MicroBatch:
        """The row with this rank's tokens and labels in all that a forward reads. Its layout stays the whole row's.
        (No teacher: such runs are refused.)"""
        tokens, own = self.range, self.own
        kept = None if row.kept is None else row.kept.of(self.own_on_host)
        return dataclasses.replace(
            row,
            input_ids=row.input_ids[:, tokens],
            position_ids=row.position_ids[:, tokens],
            logit_positions=row.logit_positions.index_select(0, own) - tokens.start,
            labels=row.labels.index_select(0, own),
            kept=kept,
            experts=None if row.experts is None else row.experts[tokens],
        )

    def gather(self, of_labels: torch.Tensor) -> torch.Tensor:
        """(N, ...) what all ranks have of their labels, from this rank's (n, ...), in the row's order. The gradient of
        another rank's labels is computed there."""
        found: torch.Tensor = _Gather.apply(of_labels, self)
        return found

    def own_weights(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """(T,) weights of the row's tokens -> of this rank's; fillers have none."""
        return F.pad(of_tokens[: len(of_tokens) - self.fillers], (0, self.fillers))[self.range]

    def sum(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """A sum over this rank's tokens -> over the row's."""
        return leave(of_tokens, self.group)

    # -- attention

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(1, heads, own tokens, D) of all heads -> (1, own heads, T, D) of all tokens, of queries, keys and values."""
        size = self.group.size
        query, key, value = _divisible(query, key, value, size)
        inputs = [x[0].unflatten(0, (size, -1)).transpose(1, 2) for x in (query, key, value)]  # (S, tokens, heads, D)
        if query.shape[-1] == value.shape[-1]:
            found = self._to_heads(torch.cat(inputs, dim=2)).split([x.shape[2] for x in inputs], dim=1)
        else:
            found = tuple(map(self._to_heads, inputs))
        q, k, v = (x.transpose(0, 1)[None] for x in found)
        return q, k, v

    def _to_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Exchange.apply(tokens, self.send_heads, self.send_tokens)
        return found

    def to_all_tokens(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """(1, own tokens, heads, D) of all heads -> (1, T, own heads, D) of all tokens."""
        filled = -of_tokens.shape[2] % self.group.size
        by_rank = F.pad(of_tokens[0], (0, 0, 0, filled)).unflatten(1, (self.group.size, -1)).transpose(0, 1)
        return self._to_heads(by_rank)[None]

    def own_heads(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Of (H, ...) those of the heads that `to_all_tokens` or, of queries, `to_heads` gives this rank."""
        each = -(-len(of_heads) // self.group.size)
        behind = (0, 0) * (of_heads.dim() - 1) + (0, each * self.group.size - len(of_heads))
        return F.pad(of_heads, behind).split(each)[self.group.place]

    def to_tokens(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """(1, T, own heads, D) of all tokens -> (1, own tokens, heads, D) of all heads."""
        found: torch.Tensor = _Exchange.apply(output[0], self.send_tokens, self.send_heads)
        return found.transpose(0, 1).flatten(1, 2)[None, :, :heads]

    def send_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """(S, own tokens, heads, D), of which each rank gets one -> (T, heads, D)."""
        size, count = tokens.shape[:2]
        return self.group.all_to_all(tokens.flatten(0, 1), [count] * size, self.tokens)

    def send_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """(T, heads, D), of which each rank gets its tokens -> (S, own tokens, heads, D)."""
        size, count = self.group.size, self.tokens[self.group.place]
        return self.group.all_to_all(heads, self.tokens, [count] * size).unflatten(0, (size, count))


def cut(model: Any, row: MicroBatch) -> tuple[MicroBatch, RowPart | None]:
    """What this rank computes of a row, and None if that is all of it."""
    groups: RowGroups | None = getattr(model, "row_groups", None)
    if groups is None or model.config._attn_implementation != PACKED:
        return row, None
    positions = row.logit_positions.cpu() if row.host_positions is None else row.host_positions
    filled = _with_a_token_for_each(row, groups.sequence.size)
    part = RowPart.of(groups.sequence, filled.layout.num_tokens, positions, row.input_ids.device)
    part = dataclasses.replace(part, fillers=filled.layout.num_tokens - row.layout.num_tokens)
    return part.cut(filled), part


def _with_a_token_for_each(row: MicroBatch, ranks: int) -> MicroBatch:
    """The layers of some models take no empty input. So a row with fewer tokens than ranks gets some more behind it, as
    a segment that nothing sees, without a label."""
    missing = ranks - row.layout.num_tokens
    if missing <= 0:
        return row
    filled = {name: F.pad(getattr(row, name), (0, missing)) for name in ("input_ids", "position_ids")}
    experts = None if row.experts is None else F.pad(row.experts, (0, 0, 0, 0, 0, missing), value=UNKNOWN)
    layout = SegmentLayout((*row.layout.lengths, missing), (*row.layout.attends_to, ()))
    return dataclasses.replace(row, layout=layout, experts=experts, **filled)


def _divisible(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (1, heads, tokens, D) whose heads the ranks divide, in the order of ranks."""
    heads, keys = query.shape[1], key.shape[1]
    if heads % ranks == 0 and keys % ranks == 0:
        return query, key, value
    if heads % ranks == 0 and ranks % keys == 0:  # several ranks need the same one
        index = torch.arange(ranks) // (ranks // keys)
    else:
        filled = -(-heads // ranks) * ranks
        query = F.pad(query, (0, 0, 0, 0, 0, filled - heads))
        index = torch.arange(filled).clamp(max=heads - 1) // (heads // keys)
    index = to_device_async(index, key.device)
    return query, key.index_select(1, index), value.index_select(1, index)


class _Exchange(torch.autograd.Function):
    """A way to send what ranks have, each number once, so that the way back gives the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Send, back: Send) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, part: RowPart) -> torch.Tensor:
        ctx.part = part
        most = max(part.labels)
        filled = own.new_zeros(most, *own.shape[1:])
        filled[: len(own)] = own
        return part.group.all_gather(filled).index_select(0, part.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.part.own), None
