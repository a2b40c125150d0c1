"""A step's first rows: ranks train them before all groups are sampled. A replay repeats the recorded first rows.

The step's other groups are balanced and packed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...batch import PackedGroup, PackedRow, ScoredGroup
from ...parallel.balance import exchange
from ...parallel.ranks import gather, rank
from ...policy.packing import NOBODY, PackingRules, advantages_of, dummy
from ...reporting.metrics import Metrics
from .partition import Partition, Row, fits, has_equal_counts, pieces_of


@dataclass
class EarlyRows:
    """The rows of a step that a rank trained before ranks exchanged groups."""

    groups: list[ScoredGroup] = field(default_factory=list)  # groups it took, its own or others'
    rows: list[PackedRow] = field(default_factory=list)  # rows of these groups, with computed gradients
    metrics: Metrics = field(default_factory=Metrics)  # metrics of the rows' losses

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out: the caller drops all gradients, and trains the groups with the others."""
        return bool(self.groups) and not self.rows


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A step's groups on this rank, divided into groups with first rows and groups to pack."""

    rest: list[ScoredGroup]
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
        recorded: first rows of all ranks when the step was trained before. Nothing is trained then, and the same rows
            come first. It is ignored if ranks train rows together, because it may give them different rows. It is also
            ignored if ranks must have equal numbers of rows and the recorded ones differ.
    """
    if recorded is not None and (rules.ranks_per_row > 1 or (rules.equal_counts and not has_equal_counts(recorded))):
        recorded = None
    if early is None and recorded is None:
        return FirstRows([*groups])
    own = [(scored.group.position, len(scored.group.rollouts)) for scored in groups]
    held: Sequence[Sequence[tuple[int, int]]]
    if recorded is None:
        assert early is not None
        held, partition = zip(*gather((own, tuple(map(_row_of, early.rows)))), strict=True)
        trained = bool(early.rows)
    else:
        held, partition, trained = gather(own), recorded, False
        if len(recorded) != len(held) or not fits(recorded, dict(entry for of_rank in held for entry in of_rank)):
            return FirstRows([*groups])  # another number of ranks, say; the update is equal up to rounding
        early = _as_recorded(groups, recorded, held, rules)
    owners = {position: owner for owner, of_rank in enumerate(held) for position, _ in of_rank}
    # A group without rows, because memory ran out on the rank that took it, returns to its owner.
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
    """Collect this rank's groups and untrained rows of a recorded partition. A collective.

    Args:
        held: position and size of each rank's groups.
    """
    places = {position: (owner, index) for owner, row in enumerate(held) for index, (position, _) in enumerate(row)}
    positions = [dict.fromkeys(position for position, _ in pieces_of((rows,))) for rows in recorded]
    taken = exchange(groups, [[places[position] for position in of_rank] for of_rank in positions])
    by_position = {scored.group.position: scored for scored in taken}
    return EarlyRows(taken, [_row_from(row, by_position, rules) for row in recorded[rank()]])


def _row_of(row: PackedRow) -> Row:
    return tuple((part.ids[0].position, tuple(identity.index for identity in part.ids)) for part in row.parts)


def _row_from(row: Row, groups: dict[int, ScoredGroup], rules: PackingRules) -> PackedRow:
    if row[0][0] == NOBODY:
        return dummy(rules.device)
    parts = []
    for position, indices in row:
        group, advantages = groups[position].group, advantages_of(groups[position])
        ids = tuple(group.rollout_ids[index] for index in indices)
        rollouts = tuple(group.rollouts[index] for index in indices)
        parts.append(PackedGroup(ids, rollouts, tuple(advantages[index] for index in indices), group.example))
    return PackedRow(tuple(parts), rules.mask_truncated, rules.device)
