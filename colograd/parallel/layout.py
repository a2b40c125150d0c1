"""Who is who among the ranks of a run: which prompts a rank takes, with whom it shares an engine, a shard, a node."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .ranks import gather


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank. Ranks that share an engine are neighbours, and take the same prompts.

    Example, 8 ranks on 2 nodes with engines of 2 ranks each:

        rank           0 1 2 3 | 4 5 6 7
        data_rank      0 0 1 1 | 2 2 3 3    of data_size 4: which share of each step's prompts
        engine_place   0 1 0 1 | 0 1 0 1    which part of the engine
        shard_group    0 2 4 6 are one, 1 3 5 7 the other: each group has one part of the weights to share out
        node           0 0 0 0 | 1 1 1 1
    """

    rank: int = 0
    world_size: int = 1
    ranks_per_engine: int = 1
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)
        assert self.world_size % self.ranks_per_engine == 0, (self.world_size, self.ranks_per_engine)

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` shares of the prompts this rank takes."""
        return self.rank // self.ranks_per_engine

    @property
    def data_size(self) -> int:
        """Engines, and with them shares of the prompts."""
        return self.world_size // self.ranks_per_engine

    @property
    def engine_place(self) -> int:
        """This rank's place among those of its engine."""
        return self.rank % self.ranks_per_engine

    @property
    def engine_group(self) -> tuple[int, ...]:
        """The ranks of this rank's engine."""
        first = self.rank - self.engine_place
        return tuple(range(first, first + self.ranks_per_engine))

    @property
    def shard_group(self) -> tuple[int, ...]:
        """One rank of each engine, all with the same part of the weights: gradients are summed among them, and each may
        own a share of what that part needs (ZeRO)."""
        return tuple(range(self.engine_place, self.world_size, self.ranks_per_engine))

    @property
    def node(self) -> int:
        """The machine."""
        return self.rank // self.ranks_per_node

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


def check_machines(layout: RankLayout) -> None:
    """Check that the ranks of each engine are on one machine, by its name. A collective where engines have several.

    Raises:
        ValueError: on all ranks, naming the first engine whose aren't.
    """
    size = layout.ranks_per_engine
    if size == 1:
        return
    names = gather(socket.gethostname())
    for first in range(0, layout.world_size, size):
        if len(found := sorted(set(names[first : first + size]))) > 1:
            raise ValueError(
                f"vllm_tensor_parallel_size is {size}, but the ranks {first} to {first + size - 1}, which would share "
                f"an engine, are on {len(found)} machines ({', '.join(found)}): start as many ranks on each machine, "
                "in order, that it divides their number."
            )
