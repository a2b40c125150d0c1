"""Groups -> rows -> micro-batches of a token budget. The only place where labels are shifted against logit_positions.

A group is packed as [prompt][completion 1] ... [completion G]: the prompt goes through the model once, and each
completion attends to the prompt and itself. A row holds as many groups as the budget allows; nothing is padded. A
completion that is a tree (`batch.Branch`) has a segment per branch, which attends to the branches that lead to it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..batch import (
    Branch,
    FinishReason,
    MicroBatch,
    ModelInput,
    PackedGroup,
    PackedRow,
    Rollout,
    RolloutId,
    ScoredGroup,
    SegmentLayout,
)
from ..parallel.ranks import gather, on_all_ranks
from ..riders import Media
from .sending import to_device_async

NOBODY = -1  # prompt position of dummies, which belong to no prompt


@dataclass(frozen=True, slots=True)
class PackingRules:
    """Rules that turn a run's groups into micro-batches."""

    max_tokens: int  # token budget of a micro-batch
    mask_truncated: bool
    skip_without_signal: bool  # whether groups that would get no gradient are left out
    share_prompts: bool  # whether a row has one prompt per group; False: rows are padded later, see `padded`
    balance_ranks: bool  # whether groups move between ranks of unequal cost, see `balance`
    equal_counts: bool  # whether each rank has the same number of micro-batches, because ranks step together
    pair_cost: float  # cost of one query-key pair, in tokens, see `balance.pair_cost`
    device: torch.device
    ranks_per_engine: int = 1  # number of ranks that share out the groups of their engine
    ranks_per_row: int = 1  # number of ranks that train each row together, see `RankLayout`


def has_signal(group: ScoredGroup) -> bool:
    """Return whether any completion of the group would get a gradient."""
    return bool((group.advantages != 0).any())


def loss_tokens(rollout: Rollout, mask_truncated: bool) -> torch.Tensor:
    """Return [C] bool, True for the tokens of a completion that count in the loss."""
    if mask_truncated and rollout.finish_reason.is_truncated:
        return torch.zeros_like(rollout.sampled)
    return rollout.sampled


def pack_step(groups: Sequence[ScoredGroup], rules: PackingRules) -> tuple[PackedRow, ...]:
    """Pack one step's rows on this rank. A collective; with ``equal_counts`` ranks with fewer rows add dummies."""
    with on_all_ranks("packing"):
        rows = plan_rows(groups, rules.max_tokens, rules.mask_truncated, rules.device, rules.share_prompts)
    if rules.equal_counts:  # each rank of a row needs a token, or its experts would get no gradient
        filler = dummy(rules.device, ((1, (max(1, rules.ranks_per_row - 1),)),))
        rows += (filler,) * (max(gather(len(rows))) - len(rows))
    return rows


def dummy(device: torch.device, groups: Sequence[tuple[int, Sequence[int]]] = ((1, (1,)),)) -> PackedRow:
    """Make a row of token 0 that has zero gradients and counts in no metric, because no token is in the loss.

    ``groups`` has the number of tokens of each prompt and of its completions.
    """
    parts = []
    for prompt, completions in groups:
        dummy_prompt = ModelInput((0,) * prompt)
        rollouts = tuple(
            Rollout(
                dummy_prompt,
                array("i", [0]) * n,
                torch.zeros(n),
                torch.zeros(n, dtype=torch.bool),
                FinishReason.ABORT,
                0,
            )
            for n in completions
        )
        ids = tuple(RolloutId(NOBODY, index) for index in range(len(rollouts)))
        parts.append(PackedGroup(ids, rollouts, (torch.zeros(()),) * len(rollouts)))
    return PackedRow(tuple(parts), False, device)


def is_dummy(row: PackedRow) -> bool:
    return all(identity.position == NOBODY for identity in row.rollouts)


class PackedSequence(NamedTuple):
    """Completion in a packed row."""

    rollout: RolloutId
    prompt_ids: torch.Tensor  # [P]
    completion_ids: torch.Tensor  # [C]
    place: slice  # place in the row's [N] tensors
    images: tuple[Any, ...] = ()  # media of the prompt, with places in it
    answers: tuple[Any, ...] = ()  # media of the completion, with places in it


def sequences(row: MicroBatch) -> list[PackedSequence]:
    """Return the completions of a row without trees."""
    segments, found, at = row.input_ids[0].split(row.layout.lengths), list[PackedSequence](), 0
    ids, media = iter(row.rollouts), row.media or {}
    for index, (completion, context) in enumerate(zip(segments, row.layout.attends_to, strict=True)):
        if context:
            place, own = slice(at, at + len(completion)), (media.get(context[0], ()), media.get(index, ()))
            found.append(PackedSequence(next(ids), segments[context[0]], completion, place, *own))
            at += len(completion)
    return found


def places(row: PackedRow) -> list[tuple[RolloutId, slice]]:
    """Return the completions of a row, each with its place in the row's [N] tensors."""
    lengths = [len(rollout.completion_ids) for part in row.parts for rollout in part.rollouts]
    ends = itertools.accumulate(lengths)
    return [(identity, slice(end - n, end)) for identity, n, end in zip(row.rollouts, lengths, ends, strict=True)]


def pack(
    groups: Sequence[ScoredGroup], budget: int, mask_truncated: bool, device: torch.device, share_prompts: bool = True
) -> tuple[MicroBatch, ...]:
    """Pack groups into micro-batches, all at once; see `plan_rows`."""
    return tuple(collate(row) for row in plan_rows(groups, budget, mask_truncated, device, share_prompts))


def plan_rows(
    groups: Sequence[ScoredGroup], budget: int, mask_truncated: bool, device: torch.device, share_prompts: bool = True
) -> tuple[PackedRow, ...]:
    """Pack groups into rows of at most ``budget`` tokens, first-fit decreasing.

    A group over the budget is split by completions, and each part repeats the prompt. A single sequence over the budget
    has a row of its own. Without ``share_prompts`` each completion has its prompt, and padding counts (`padded`).
    """
    parts: list[PackedGroup] = []
    for scored in groups:
        rollouts, advantages, position = scored.group.rollouts, advantages_of(scored), scored.group.position
        ids = tuple(RolloutId(position, index) for index in range(len(rollouts)))
        starts, tokens = [0], len(rollouts[0].input)
        for index, rollout in enumerate(rollouts):
            over = not share_prompts or tokens + len(rollout.completion_ids) > budget
            if index > starts[-1] and (over or rollout.input != rollouts[starts[-1]].input):
                starts.append(index)
                tokens = len(rollout.input)
            tokens += len(rollout.completion_ids)
        cuts = [slice(start, end) for start, end in itertools.pairwise([*starts, len(rollouts)])]
        parts += [PackedGroup(ids[cut], rollouts[cut], advantages[cut], scored.group.example) for cut in cuts]
    rows: list[list[PackedGroup]] = []
    room: list[int] = []
    widths: list[int] = []  # tokens of each row's longest part
    for size, part in sorted(((part.num_tokens, part) for part in parts), key=lambda sized: -sized[0]):
        for index, free in enumerate(room):
            needs = size if share_prompts else widths[index]
            if needs <= free:
                rows[index].append(part)
                room[index] -= needs
                break
        else:
            rows.append([part])
            room.append(budget - size)
            widths.append(size)
    return tuple(PackedRow(tuple(row), mask_truncated, device) for row in rows)


def advantages_of(group: ScoredGroup) -> tuple[torch.Tensor, ...]:
    """Return the group's advantages as one tensor per completion: shape (), or [C] if each token has its own."""
    rollouts = group.group.rollouts
    if group.advantages.shape == (len(rollouts),):
        return tuple(group.advantages)
    return group.advantages.split([len(r.completion_ids) for r in rollouts])


class _End(NamedTuple):
    """End of a segment, where later segments continue."""

    path: tuple[int, ...]  # indices of the segments up to and including this one
    tokens: int  # number of tokens in the path
    place: int  # index in the row of the segment's last token


def collate(row: PackedRow) -> MicroBatch:
    """Lay out the row's tokens one after the other on its device.

    Token t of a completion is predicted at the place before it: the prompt's last token, or token t-1. In a tree the
    first token of a branch is predicted at the last token of the branch that it continues.
    """
    segments: list[torch.Tensor] = []
    position_ids: list[torch.Tensor] = []
    attends_to: list[tuple[int, ...]] = []
    media: dict[int, tuple[Media, ...]] = {}
    logit_positions: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    at = 0  # number of tokens so far

    def add(ids: torch.Tensor, before: _End) -> _End:
        nonlocal at
        position_ids.append(torch.arange(before.tokens, before.tokens + len(ids)))
        attends_to.append(before.path)
        segments.append(ids)
        at += len(ids)
        return _End((*before.path, len(segments) - 1), before.tokens + len(ids), at - 1)

    for part in row.parts:
        prompt = part.rollouts[0].input
        if prompt.media is not None:
            media[len(segments)] = (prompt.media,)
        # The prompt is cut at the inner places where a branch of these rollouts begins.
        cuts = {branch.prompt for r in part.rollouts for branch in r.branches if branch.after is None}
        ends = {0: _End((), 0, at)}  # by number of tokens; this place is arbitrary, as first tokens aren't predicted
        for first, last in itertools.pairwise((0, *sorted(cuts - {0, len(prompt)}), len(prompt))):
            ends[last] = add(torch.tensor(prompt.ids[first:last]), ends[first])
        for rollout in part.rollouts:
            if rollout.riders and (own_media := rollout.all(Media)):
                media[len(segments)] = own_media
            completion = torch.frombuffer(rollout.completion_ids, dtype=torch.int32).long()
            labels.append(completion)
            branches = rollout.branches or (Branch(len(completion), prompt=len(prompt)),)
            tree: list[_End] = []
            for ids, branch in zip(completion.split([each.length for each in branches]), branches, strict=True):
                before = ends[branch.prompt] if branch.after is None else tree[branch.after]
                logit_positions += [torch.tensor([before.place]), torch.arange(at, at + len(ids) - 1)]
                tree.append(add(ids, before))
    positions = torch.cat(logit_positions)
    rollouts = [rollout for part in row.parts for rollout in part.rollouts]
    by_sequence = (advantage for part in row.parts for advantage in part.advantages)
    advantages = [advantage.expand(len(ids)) for advantage, ids in zip(by_sequence, labels, strict=True)]
    sequence = [torch.full((len(ids),), index) for index, ids in enumerate(labels)]
    in_loss = torch.cat([loss_tokens(rollout, row.mask_truncated) for rollout in rollouts])
    riders = [kind.of_row(row) for kind in dict.fromkeys(type(r) for rollout in rollouts for r in rollout.riders)]
    device = row.device
    micro_batch = MicroBatch(
        input_ids=to_device_async(torch.cat(segments)[None], device),
        position_ids=to_device_async(torch.cat(position_ids)[None], device),
        layout=SegmentLayout(tuple(map(len, segments)), tuple(attends_to)),
        logit_positions=to_device_async(positions, device),
        labels=to_device_async(torch.cat(labels), device),
        loss_mask=to_device_async(in_loss.float(), device),
        sequence=to_device_async(torch.cat(sequence), device),
        sampler_logprobs=to_device_async(torch.cat([rollout.sampler_logprobs for rollout in rollouts]), device),
        advantages=to_device_async(torch.cat(advantages).float(), device),
        old_logprobs=row.old_logprobs,
        ref_logprobs=row.ref_logprobs,
        scores={name: to_device_async(values, device) for name, values in row.scores.items()},
        rollouts=tuple(identity for part in row.parts for identity in part.ids),
        in_loss=bool(in_loss.any()),
        completion_lengths=tuple(map(len, labels)),
        step_constants=row.step_constants,
        media=media or None,
        riders=tuple(rider for rider in riders if rider is not None),
        host_positions=positions,
    )
    for rider in micro_batch.riders:
        micro_batch = rider.applied(micro_batch)
    return micro_batch
