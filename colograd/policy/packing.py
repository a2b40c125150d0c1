"""Pack groups of completions into rows within a token budget, and convert rows to `MicroBatch`es.

A row is a sequence of parts. A part has completions of one group behind their prompt:
[prompt][completion 1] ... [completion n].
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import (
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
from .padded import media_of
from .sending import to_device_async

NOBODY = -1  # `RolloutId.position` of completions in a `dummy` row.


@dataclass(frozen=True, slots=True)
class PackingRules:
    max_tokens: int
    mask_truncated: bool  # Whether truncated completions are left out of the loss.
    skip_without_signal: bool  # Whether groups with only zero advantages aren't trained.
    share_prompts: bool  # Whether a group's completions share one copy of the prompt. False: rows are padded.
    balance_ranks: bool  # Whether groups move between ranks, so that ranks have similar costs.
    equal_counts: bool  # Whether all ranks need equal numbers of micro-batches.
    pair_cost: float  # Cost of one query-key pair of attention, relative to the cost of a token.
    device: torch.device
    ranks_per_engine: int = 1  # Number of ranks that divide an engine's groups among themselves.
    ranks_per_row: int = 1  # Number of ranks that train every row together.


def has_signal(group: ScoredGroup) -> bool:
    return bool((group.advantages != 0).any())


def loss_tokens(rollout: Rollout, mask_truncated: bool) -> torch.Tensor:
    """Return a mask [C] bool of the completion's tokens that count in the loss."""
    if mask_truncated and rollout.finish_reason.is_truncated:
        return torch.zeros_like(rollout.sampled)
    return rollout.sampled


def pack_step(groups: Sequence[ScoredGroup], rules: PackingRules) -> tuple[PackedRow, ...]:
    """Pack this rank's groups of one optimizer step into rows. All ranks must call this (a collective)."""
    with on_all_ranks("packing"):
        rows = plan_rows(groups, rules.max_tokens, rules.mask_truncated, rules.device, rules.share_prompts)
    if rules.equal_counts:  # A filler row has a token for each rank that shares the row.
        filler = dummy(rules.device, ((1, (max(1, rules.ranks_per_row - 1),)),))
        rows += (filler,) * (max(gather(len(rows))) - len(rows))
    return rows


def dummy(device: torch.device, groups: Sequence[tuple[int, Sequence[int]]] = ((1, (1,)),)) -> PackedRow:
    """Make a row of token ids 0, left out of the loss. ``groups``: per group (prompt length, completion lengths)."""
    parts = []
    for prompt, completions in groups:
        dummy_prompt = ModelInput((0,) * prompt)
        rollouts = []
        for n in completions:
            ids, sampled = array("i", [0]) * n, torch.zeros(n, dtype=torch.bool)
            rollouts.append(Rollout(dummy_prompt, ids, torch.zeros(n), sampled, FinishReason.ABORT, 0))
        identities = tuple(RolloutId(NOBODY, index) for index in range(len(rollouts)))
        parts.append(PackedGroup(identities, tuple(rollouts), (torch.zeros(()),) * len(rollouts)))
    return PackedRow(tuple(parts), False, device)


def is_dummy(row: PackedRow) -> bool:
    return all(identity.position == NOBODY for identity in row.rollouts)


def places(row: PackedRow) -> list[tuple[RolloutId, slice]]:
    """Return (`RolloutId`, range among the row's N labels) for each completion in a row."""
    lengths = [len(rollout.completion_ids) for part in row.parts for rollout in part.rollouts]
    ends = itertools.accumulate(lengths)
    return [(identity, slice(end - n, end)) for identity, n, end in zip(row.rollouts, lengths, ends, strict=True)]


def pack(
    groups: Sequence[ScoredGroup], budget: int, mask_truncated: bool, device: torch.device, share_prompts: bool = True
) -> tuple[MicroBatch, ...]:
    return tuple(collate(row) for row in plan_rows(groups, budget, mask_truncated, device, share_prompts))


def plan_rows(
    groups: Sequence[ScoredGroup], budget: int, mask_truncated: bool, device: torch.device, share_prompts: bool = True
) -> tuple[PackedRow, ...]:
    """Pack groups into rows of at most ``budget`` tokens, by first-fit decreasing.

    If a prompt and its completion have more than ``budget`` tokens, the two get a row of their own. Without
    ``share_prompts`` rows are padded, and the budget includes padding.
    """
    parts: list[PackedGroup] = []
    for scored in groups:
        rollouts, advantages = scored.group.rollouts, advantages_of(scored)
        ids = tuple(RolloutId(scored.group.position, index) for index in range(len(rollouts)))
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
    widths: list[int] = []  # Number of tokens of each row's longest sequence, if rows are padded.
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
    """Return a tensor per completion, of shape () for a single advantage, or (C,) for one advantage per token."""
    rollouts = group.group.rollouts
    if group.advantages.shape == (len(rollouts),):
        return tuple(group.advantages)
    return group.advantages.split([len(r.completion_ids) for r in rollouts])


def collate(row: PackedRow) -> MicroBatch:
    """Make the `MicroBatch` of a row. A completion's first token is predicted at the prompt's last token."""
    segments, position_ids, logit_positions, labels = (list[torch.Tensor]() for _ in range(4))
    attends_to: list[tuple[int, ...]] = []
    at = 0
    for part in row.parts:
        prompt, first = part.rollouts[0].input, len(segments)
        segments.append(torch.tensor(prompt.ids))
        position_ids.append(torch.arange(len(prompt)))
        attends_to.append(())
        at += len(prompt)
        prompt_end = at - 1
        for rollout in part.rollouts:
            completion = torch.frombuffer(rollout.completion_ids, dtype=torch.int32).long()
            segments.append(completion)
            labels.append(completion)
            position_ids.append(torch.arange(len(prompt), len(prompt) + len(completion)))
            logit_positions += [torch.tensor([prompt_end]), torch.arange(at, at + len(completion) - 1)]
            attends_to.append((first,))
            at += len(completion)
    rollouts = [rollout for part in row.parts for rollout in part.rollouts]
    by_sequence = (advantage for part in row.parts for advantage in part.advantages)
    advantages = [advantage.expand(len(ids)) for advantage, ids in zip(by_sequence, labels, strict=True)]
    in_loss = torch.cat([loss_tokens(rollout, row.mask_truncated) for rollout in rollouts])
    riders = [kind.of_row(row) for kind in dict.fromkeys(type(r) for rollout in rollouts for r in rollout.riders)]
    host: dict[str, Any] = {
        "input_ids": torch.cat(segments)[None],
        "position_ids": torch.cat(position_ids)[None],
        "logit_positions": torch.cat(logit_positions),
        "labels": torch.cat(labels),
        "loss_mask": in_loss.float(),
        "sequence": torch.cat([torch.full((len(ids),), index) for index, ids in enumerate(labels)]),
        "sampler_logprobs": torch.cat([rollout.sampler_logprobs for rollout in rollouts]),
        "advantages": torch.cat(advantages).float(),
    }
    scores = {name: to_device_async(values, row.device) for name, values in row.scores.items()}
    micro_batch = MicroBatch(
        **{name: to_device_async(tensor, row.device) for name, tensor in host.items()},
        layout=SegmentLayout(tuple(map(len, segments)), tuple(attends_to)),
        old_logprobs=scores.pop("old_logprobs", None),
        scores=scores,
        rollouts=tuple(identity for part in row.parts for identity in part.ids),
        in_loss=bool(in_loss.any()),
        completion_lengths=tuple(map(len, labels)),
        step_constants=row.step_constants,
        media=media_of(row) if any(rollout.riders or rollout.input.media for rollout in rollouts) else None,
        riders=tuple(rider for rider in riders if rider is not None),
        host_positions=host["logit_positions"],
    )
    for rider in micro_batch.riders:
        micro_batch = rider.applied(micro_batch)
    return micro_batch
