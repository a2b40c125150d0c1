"""Micro-batches that were trained before all of their step was sampled.

They are recorded in the round's folder, so that a resumed or replayed step is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...policy.packing import NOBODY
from ...rollout.figures import add_step, steps_in
from ...rollout.store import RolloutStore

FILE = "partition.jsonl"
LARGEST = 2**26  # maximum bytes read of the file

Piece = tuple[int, tuple[int, ...]]  # a group's position, the indices of its completions
Row = tuple[Piece, ...]  # one micro-batch; a filler has the position NOBODY
Partition = tuple[tuple[Row, ...], ...]  # micro-batches of each rank


def record_partition(journal: RolloutStore, step: int, partition: Partition) -> None:
    journal.note_beside(lambda folder: note_partition(folder, step, partition))


def recorded_partition(journal: RolloutStore, step: int) -> Partition | None:
    """Return the partition of a round's first step, or None if nothing was trained while ranks sampled."""
    return read_partition(journal.round_folder(step - 1), step)


def note_partition(folder: Path, step: int, partition: Partition) -> None:
    add_step(folder / FILE, step, {"ranks": partition})


def read_partition(folder: Path, step: int) -> Partition | None:
    """Return the partition of the first time that the step was trained, or None if nothing was trained early."""
    for found, entry in steps_in(folder / FILE, LARGEST):
        try:
            if found == step:
                return tuple(tuple(_row(row) for row in rows) for rows in entry["ranks"])
        except (ValueError, TypeError, KeyError):
            continue
    return None


def _row(pieces: Sequence[Sequence[object]]) -> Row:
    found = tuple((_number(position), tuple(map(_number, indices))) for position, indices in pieces)  # type: ignore[call-overload]
    if not all(indices for _, indices in found) or not found:
        raise ValueError("a micro-batch is empty")
    return found


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    return value


def pieces_of(partition: Partition) -> Iterator[Piece]:
    """Yield the pieces of all rows, without fillers."""
    return (piece for rows in partition for row in rows for piece in row if piece[0] != NOBODY)


def has_equal_counts(partition: Partition) -> bool:
    """Return whether all ranks have equally many micro-batches, as ranks that meet in each backward need."""
    return len({len(rows) for rows in partition}) <= 1


def fits(partition: Partition, sizes: Mapping[int, int]) -> bool:
    """Return whether a step's groups can be trained in that partition.

    Each completion must be there once, and all completions of a group on one rank.

    Args:
        sizes: position of a group -> number of its completions.
    """
    for rows in partition:
        of_rank: dict[int, list[int]] = {}
        for position, indices in pieces_of((rows,)):
            of_rank.setdefault(position, []).extend(indices)
        if any(sorted(indices) != [*range(sizes.get(position, 0))] for position, indices in of_rank.items()):
            return False
    positions = [position for rows in partition for position in {piece[0] for piece in pieces_of((rows,))}]
    return len(positions) == len(set(positions))
