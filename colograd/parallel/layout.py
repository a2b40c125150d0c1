"""Who is who among the ranks of a run: which prompts a rank takes, with whom it shares an engine, a shard, a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime import process


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank. Ranks that share an engine are neighbours, and take the same prompts.

    Example, 8 ranks on 2 nodes with engines of 2 ranks each:

        rank           0 1 2 3 | 4 5 6 7
        data_rank      0 0 1 1 | 2 2 3 3    of data_size 4: which share of each step's prompts
        engine_place   0 1 0 1 | 0 1 0 1    which part of the engine
        shard_group    0 2 4 6 are one, 1 3 5 7 the other: each group has one part of the weights to share out
        node           0 0 0 0 | 1 1 1 1

    If the ranks of an engine also hold a policy in parts, and 2 ranks share out a row's tokens (T = 2, S = 2):

        row_group      0 to 3 are one, 4 to 7 the other: each trains rows of its own
        sequence_group 0 2, 1 3, 4 6 and 5 7: each has the same part of the policy, and halves of a row
    """

    rank: int = 0
    world_size: int = 1
    ranks_per_engine: int = 1
    ranks_per_node: int = 1
    ranks_per_sequence: int = 1  # that share out the tokens of a row
    policy_parts: int = 1  # ranks that hold a policy together: 1, or those of an engine

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)
        assert self.world_size % self.ranks_per_engine == 0, (self.world_size, self.ranks_per_engine)
        assert self.world_size % self.ranks_per_row == 0, (self.world_size, self.ranks_per_row)
        assert self.policy_parts in (1, self.ranks_per_engine), (self.policy_parts, self.ranks_per_engine)

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
        first = self.rank - self.engine_place
        return tuple(range(first, first + self.ranks_per_engine))

    @property
    def shard_group(self) -> tuple[int, ...]:
        """One rank of each engine, all with the same part of the weights, among which gradients are summed."""
        return tuple(range(self.engine_place, self.world_size, self.ranks_per_engine))

    @property
    def ranks_per_row(self) -> int:
        """Neighbours that train each row together: with parts of the policy, of the row's tokens, or of both."""
        return self.ranks_per_sequence * self.policy_parts

    @property
    def row_group(self) -> tuple[int, ...]:
        first = self.rank - self.rank % self.ranks_per_row
        return tuple(range(first, first + self.ranks_per_row))

    @property
    def sequence_group(self) -> tuple[int, ...]:
        """Of the row's ranks those with the same part of the policy, which share out its tokens."""
        return self.row_group[self.rank % self.policy_parts :: self.policy_parts]

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def nodes(self) -> int:
        """Machines. All have the same number of ranks."""
        return self.world_size // self.ranks_per_node

    @property
    def leads_node(self) -> bool:
        """Whether this rank writes what each node writes once."""
        return self.rank % self.ranks_per_node == 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: what its launcher and its device say."""

    host: str
    local_rank: int
    ranks_per_node: int
    device: str = ""  # which GPU of the world; empty on a CPU

    @classmethod
    def here(cls, device: torch.device) -> Place:
        of_gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(socket.gethostname(), int(os.environ.get("LOCAL_RANK") or 0), process.local_world_size(), of_gpu)


def check_places(places: Sequence[Place]) -> None:
    """Raise a ValueError if ranks don't lie on nodes as `RankLayout` counts them, each on a device of its own."""
    if len(places) == 1:
        return
    sizes = {place.ranks_per_node for place in places}
    if len(sizes) > 1 or len(places) % min(sizes):
        found = ", ".join(dict.fromkeys(f"{place.ranks_per_node} on {place.host}" for place in places))
        raise ValueError(
            f"The nodes have different numbers of ranks (LOCAL_WORLD_SIZE: {found}; {len(places)} in all), but each "
            "must have the same: start as many on every node (`torchrun --nproc-per-node`, `srun --ntasks-per-node`)."
        )
    size = sizes.pop()
    for rank, place in enumerate(places):
        first = rank - rank % size
        if place.local_rank != rank % size or place.host != places[first].host:
            raise ValueError(
                f"Rank {rank} is local rank {place.local_rank} on {place.host}, but nodes of {size} ranks "
                f"(LOCAL_WORLD_SIZE) have neighbouring ones, here {first} to {first + size - 1}, which begin on "
                f"{places[first].host}: set RANK, LOCAL_RANK and LOCAL_WORLD_SIZE as `torchrun` does (with `srun`: "
                "`--distribution=block`)."
            )
    taken: dict[str, int] = {}
    for rank, place in enumerate(places):
        other = taken.setdefault(place.device, rank) if place.device else rank
        if other != rank:
            raise ValueError(
                f"Ranks {other} and {rank} were given the same GPU of {place.host}, but each needs one of its own: "
                "start at most as many ranks on a node as it has GPUs, or look at CUDA_VISIBLE_DEVICES."
            )


def check_engines(layout: RankLayout, places: Sequence[Place]) -> None:
    """Raise a ValueError if an engine's ranks are on several machines, on all ranks alike."""
    size, on_node = layout.ranks_per_engine, layout.ranks_per_node
    for first in range(0, layout.world_size if size > 1 else 0, size):
        shared = places[first : first + size]
        if len({(rank // on_node, place.host) for rank, place in enumerate(shared, start=first)}) > 1:
            found = sorted({place.host for place in shared})
            raise ValueError(
                f"vllm_tensor_parallel_size is {size}, but the ranks {first} to {first + size - 1}, which would share "
                f"an engine, are on different machines ({', '.join(found)}): start as many ranks on each machine, in "
                "order, that it divides their number."
            )
