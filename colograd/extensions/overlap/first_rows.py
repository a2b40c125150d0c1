"""First rows: the packed rows of an optimizer step that ranks train before all of the step's groups are sampled.

The step's other groups are packed later. First rows are recorded in the folder of the round (the prompts sampled with
one set of weights), so that a resumed or replayed step is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...batch import PackedGroup, PackedRow, ScoredGroup
from ...parallel.balance import exchange
from ...parallel.ranks import gather, rank
from ...policy.packing import NOBODY, PackingRules, advantages_of, dummy
from ...reporting.metrics import Metrics
from ...rollout.record_file import steps_in

FILE = "partition.jsonl"
LARGEST = 2**26  # Maximum number of bytes that are read from the file.

Piece = tuple[int, tuple[int, ...]]  # Position of a group, and the indices of its completions in one micro-batch.
Row = tuple[Piece, ...]  # Pieces of groups in one micro-batch. A dummy micro-batch has one piece with position NOBODY.
Partition = tuple[tuple[Row, ...], ...]  # Rows of each rank.


def read_partition(folder: Path, step: int) -> Partition | None:
    """Read which first rows each rank trained when a step was trained first. None: the step had no first rows."""

    def row_of(pieces: Sequence[tuple[int, Sequence[int]]]) -> Row:
        return tuple((int(position), tuple(map(int, indices))) for position, indices in pieces)

    for noted, entry in steps_in(folder / FILE, LARGEST):
        try:
            if noted == step:
                return tuple(tuple(map(row_of, rows)) for rows in entry["ranks"])
        except (ValueError, TypeError, KeyError):
            continue
    return None


def pieces_of(partition: Partition) -> Iterator[Piece]:
    """Yield the pieces of groups in all rows of all ranks. Dummy rows are left out."""
    return (piece for rows in partition for row in rows for piece in row if piece[0] != NOBODY)


def fits(partition: Partition, sizes: Mapping[int, int]) -> bool:
    """Return whether a partition (first rows of all ranks) has only whole groups of the step, each on one rank.
    ``sizes`` are the numbers of completions of the step's groups, by the groups' positions."""
    seen: set[int] = set()
    for rows in partition:
        of_rank: dict[int, list[int]] = {}
        for position, indices in pieces_of((rows,)):
            of_rank.setdefault(position, []).extend(indices)
        if seen & of_rank.keys() or any(sorted(of_rank[at]) != [*range(sizes.get(at, 0))] for at in of_rank):
            return False
        seen |= of_rank.keys()
    return True


@dataclass
class EarlyRows:
    """Rows of the next optimizer step that this rank has trained before all groups were sampled."""

    groups: list[ScoredGroup] = field(default_factory=list)  # Groups that this rank has trained, from any rank.
    rows: list[PackedRow] = field(default_factory=list)  # Packed rows of the groups, with computed gradients.
    metrics: Metrics = field(default_factory=Metrics)  # Metrics of the rows' losses.


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A step's groups on this rank: groups of first rows (trained early), and groups that must be packed."""

    rest: list[ScoredGroup]  # Groups that must still be packed.
    early: EarlyRows = field(default_factory=EarlyRows)  # First rows of this rank, and their groups.
    trained: bool = False  # Whether the gradients of the first rows are computed.
    moved: int = 0  # Number of groups of the first rows that another engine sampled.
    partition: Partition = ()  # First rows of all ranks.


def first_rows(
    groups: Sequence[ScoredGroup], early: EarlyRows | None, recorded: Partition | None, rules: PackingRules
) -> FirstRows:
    """Divide a step's groups into groups of first rows (trained early) and groups that must be packed. A collective,
    unless both ``early`` and ``recorded`` are None.

    Args:
        groups: groups with a gradient that this rank sampled.
        early: rows that this rank has trained before all groups were sampled.
        recorded: first rows of all ranks in an earlier training of the step. They come first again, untrained. The
            record is ignored if ranks train rows together, because it may give these ranks different rows. The
            record is also ignored if ranks must have equal numbers of rows, but the recorded numbers differ.
    """
    if recorded is not None:
        differ = len({len(rows) for rows in recorded}) > 1
        recorded = None if rules.ranks_per_row > 1 or (rules.equal_counts and differ) else recorded
    if early is None and recorded is None:
        return FirstRows([*groups])
    own = [(scored.group.position, len(scored.group.rollouts)) for scored in groups]
    held: Sequence[Sequence[tuple[int, int]]]  # Position and number of completions of each group of each rank.
    if recorded is None:
        assert early is not None
        rows_of_rank = tuple(
            tuple((part.ids[0].position, tuple(identity.index for identity in part.ids)) for part in row.parts)
            for row in early.rows
        )
        held, partition = zip(*gather((own, rows_of_rank)), strict=True)
        trained = bool(early.rows)
    else:
        held, partition, trained = gather(own), recorded, False
        if len(recorded) != len(held) or not fits(recorded, dict(entry for of_rank in held for entry in of_rank)):
            return FirstRows([*groups])  # The record doesn't fit, so the step is equal to it only up to rounding.
        early = _as_recorded(groups, recorded, held, rules)
    owners = {position: owner for owner, of_rank in enumerate(held) for position, _ in of_rank}
    # If memory ran out on the rank that took a group, the group has no rows. The rank that sampled the group packs it.
    taken = {position for position, _ in pieces_of(partition)}
    rest = [scored for scored in groups if scored.group.position not in taken]
    early = early if early.rows else EarlyRows()
    engine = rank() // rules.ranks_per_engine
    moved = sum(owners[scored.group.position] // rules.ranks_per_engine != engine for scored in early.groups)
    return FirstRows(rest, early, trained, moved, partition)


def _as_recorded(
    groups: Sequence[ScoredGroup], recorded: Partition, held: Sequence[Sequence[tuple[int, int]]], rules: PackingRules
) -> EarlyRows:
    """Exchange groups, and return this rank's groups and untrained rows of a recorded partition. A collective."""
    places = {position: (owner, index) for owner, row in enumerate(held) for index, (position, _) in enumerate(row)}
    positions = [dict.fromkeys(position for position, _ in pieces_of((rows,))) for rows in recorded]
    taken = exchange(groups, [[places[position] for position in of_rank] for of_rank in positions])
    by_position = {scored.group.position: scored for scored in taken}
    rows = []
    for row in recorded[rank()]:
        if row[0][0] == NOBODY:
            rows.append(dummy(rules.device))
            continue
        parts = []
        for position, indices in row:
            group, advantages = by_position[position].group, advantages_of(by_position[position])
            columns: tuple[Any, ...] = (group.rollout_ids, group.rollouts, advantages)
            ids, rollouts, own = (tuple(column[index] for index in indices) for column in columns)
            parts.append(PackedGroup(ids, rollouts, own, group.example))
        rows.append(PackedRow(tuple(parts), rules.mask_truncated, rules.device))
    return EarlyRows(taken, rows)
