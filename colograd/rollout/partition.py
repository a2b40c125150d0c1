"""Micro-batches of a step that were trained before all of it was sampled, as they are recorded in the round's folder: a
resumed or replayed step has the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..policy.packing import NOBODY
from .step_lines import add_step, steps_in

FILE = "partition.jsonl"
LARGEST = 2**26  # bytes that are read

Piece = tuple[int, tuple[int, ...]]  # a group's position, and which of its completions
Row = tuple[Piece, ...]  # a micro-batch; of a filler the position is NOBODY
Partition = tuple[tuple[Row, ...], ...]  # of each rank


def note_partition(folder: Path, step: int, partition: Partition) -> None:
    add_step(folder / FILE, step, {"ranks": partition})


def read_partition(folder: Path, step: int) -> Partition | None:
    """The step's partition when it was trained first; None: nothing was trained early."""
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
    """Without those of fillers."""
    return (piece for rows in partition for row in rows for piece in row if piece[0] != NOBODY)


def has_equal_counts(partition: Partition) -> bool:
    """Whether ranks that meet in each backward can train it: all have equally many micro-batches."""
    return len({len(rows) for rows in partition}) <= 1


def fits(partition: Partition, sizes: Mapping[int, int]) -> bool:
    """Whether a step's groups, of which ``sizes`` has the completions by position, can be trained in that partition: no
    completion twice, and the completions of a group all, on one rank."""
    for rows in partition:
        of_rank: dict[int, list[int]] = {}
        for position, indices in pieces_of((rows,)):
            of_rank.setdefault(position, []).extend(indices)
        if any(sorted(indices) != [*range(sizes.get(position, 0))] for position, indices in of_rank.items()):
            return False
    positions = [position for rows in partition for position in {piece[0] for piece in pieces_of((rows,))}]
    return len(positions) == len(set(positions))
