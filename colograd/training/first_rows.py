"""A step's first rows: those that ranks trained before all was sampled, or that a recorded step trained so. The rest of
its groups is still to be balanced and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..batch import PackedGroup, PackedRow, ScoredGroup
from ..parallel.balance import exchange
from ..parallel.ranks import gather, rank
from ..policy.packing import NOBODY, PackingRules, advantages_of, dummy, teacher_named
from ..reporting.metrics import Metrics
from ..rollout.partition import Partition, Row, fits, has_equal_counts, pieces_of


@dataclass
class EarlyRows:
    """What a rank has trained of a step before ranks exchange groups."""

    groups: list[ScoredGroup] = field(default_factory=list)  # that it took, its own or others'
    rows: list[PackedRow] = field(default_factory=list)  # of these groups: their gradients are made
    metrics: Metrics = field(default_factory=Metrics)  # of the rows' losses

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out: all gradients are to be dropped, and the groups are trained with the others."""
        return bool(self.groups) and not self.rows


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A step's groups on this rank, divided into those whose rows come first and the rest, which is still to pack."""

    rest: list[ScoredGroup]
    groups: tuple[ScoredGroup, ...] = ()  # of the rows
    rows: tuple[PackedRow, ...] = ()
    trained: bool = False  # whether the rows' gradients are made
    moved: int = 0  # of the groups: how many another engine sampled
    partition: Partition = ()  # the first rows of all ranks


def first_rows(
    groups: Sequence[ScoredGroup], early: EarlyRows | None, recorded: Partition | None, rules: PackingRules
) -> FirstRows:
    """Divide a step's groups. A collective, unless both ``early`` and ``recorded`` are None.

    Args:
        groups: this rank's own that are to be packed.
        early: what this rank has trained.
        recorded: of all ranks, when the step was trained before; then nothing is trained, and the same rows come first.
            Ranks that train rows together can't have it, as it may give them different ones, nor those that step
            together one of ranks that didn't.
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
            return FirstRows([*groups])  # of another number of ranks, say: the update is equal up to rounding
        early = _as_recorded(groups, recorded, held, rules)
    owners = {position: owner for owner, of_rank in enumerate(held) for position, _ in of_rank}
    # What a rank took and has no rows of, as memory ran out there, is its owner's again.
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
    """This rank's groups and rows of a recorded partition; they aren't trained yet. A collective.

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
        rollouts, teacher = tuple(group.rollouts[index] for index in indices), teacher_named(groups[position])
        parts.append(PackedGroup(ids, rollouts, tuple(advantages[index] for index in indices), teacher))
    return PackedRow(tuple(parts), rules.mask_truncated, rules.device)
