"""A step's first rows: ranks train them before all groups are sampled. The step's other groups are packed later.

First rows are recorded in the round's folder, so that a resumed or replayed step is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...batch import PackedGroup, PackedRow, ScoredGroup
from ...parallel.balance import exchange
from ...parallel.ranks import gather, rank
from ...policy.packing import NOBODY, PackingRules, advantages_of, dummy
from ...reporting.metrics import Metrics
from ...rollout.figures import add_step, steps_in

FILE = "partition.jsonl"
LARGEST = 2**26  # maximum bytes read of the file

Piece = tuple[int, tuple[int, ...]]  # position of a group, indices of its completions in one micro-batch
Row = tuple[Piece, ...]  # the pieces of one micro-batch; a filler's only piece has the position NOBODY
Partition = tuple[tuple[Row, ...], ...]  # the rows of each rank


def note_partition(folder: Path, step: int, partition: Partition) -> None:
    add_step(folder / FILE, step, {"ranks": partition})


def read_partition(folder: Path, step: int) -> Partition | None:
    """Return the partition from the first training of a step, or None if it had no first rows."""

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
    """Yield the pieces of all rows, without fillers."""
    return (piece for rows in partition for row in rows for piece in row if piece[0] != NOBODY)


def fits(partition: Partition, sizes: Mapping[int, int]) -> bool:
    """Return whether each group of a partition is whole, on one rank, and a group of the step.

    Args:
        sizes: position of each group of the step -> number of its completions.
    """
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
    """The rows of a step that a rank trained before ranks exchanged groups."""

    groups: list[ScoredGroup] = field(default_factory=list)  # groups that it trained, its own or other ranks'
    rows: list[PackedRow] = field(default_factory=list)  # rows of these groups, with computed gradients
    metrics: Metrics = field(default_factory=Metrics)  # metrics of the rows' losses


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A step's groups on this rank, divided into groups with first rows and groups to pack."""

    rest: list[ScoredGroup]  # groups to pack
    groups: tuple[ScoredGroup, ...] = ()  # groups of the first rows
    rows: tuple[PackedRow, ...] = ()
    trained: bool = False  # whether the rows' gradients are computed
    moved: int = 0  # number of the groups that another engine sampled
    partition: Partition = ()  # the first rows of all ranks


def first_rows(
    groups: Sequence[ScoredGroup], early: EarlyRows | None, recorded: Partition | None, rules: PackingRules
) -> FirstRows:
    """Divide a step's groups. A collective, unless both ``early`` and ``recorded`` are None.

    Args:
        groups: this rank's own groups to pack.
        early: rows that this rank has trained.
        recorded: first rows of all ranks when the step was trained before. They come first again, not yet trained.
            It is ignored if ranks train rows together, because it may give them different rows. It is also ignored
            if ranks must have equal numbers of rows and the recorded numbers differ.
    """
    if recorded is not None:
        differ = len({len(rows) for rows in recorded}) > 1
        recorded = None if rules.ranks_per_row > 1 or (rules.equal_counts and differ) else recorded
    if early is None and recorded is None:
        return FirstRows([*groups])
    own = [(scored.group.position, len(scored.group.rollouts)) for scored in groups]
    held: Sequence[Sequence[tuple[int, int]]]  # position and size of each rank's groups
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
            return FirstRows([*groups])  # e.g. another number of ranks: the update is then equal up to rounding
        early = _as_recorded(groups, recorded, held, rules)
    owners = {position: owner for owner, of_rank in enumerate(held) for position, _ in of_rank}
    # A group has no rows if memory ran out on the rank that took it. Its owner then packs it.
    taken = {position for position, _ in pieces_of(partition)}
    rest = [scored for scored in groups if scored.group.position not in taken]
    if not early.rows:
        return FirstRows(rest, partition=partition)
    engine = rank() // rules.ranks_per_engine
    moved = sum(owners[scored.group.position] // rules.ranks_per_engine != engine for scored in early.groups)
    return FirstRows(rest, tuple(early.groups), tuple(early.rows), trained, moved, partition)


def _as_recorded(
    groups: Sequence[ScoredGroup], recorded: Partition, held: Sequence[Sequence[tuple[int, int]]], rules: PackingRules
) -> EarlyRows:
    """Collect this rank's groups and untrained rows of a recorded partition. A collective."""
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
            ids = tuple(group.rollout_ids[index] for index in indices)
            rollouts = tuple(group.rollouts[index] for index in indices)
            parts.append(PackedGroup(ids, rollouts, tuple(advantages[index] for index in indices), group.example))
        rows.append(PackedRow(tuple(parts), rules.mask_truncated, rules.device))
    return EarlyRows(taken, rows)
