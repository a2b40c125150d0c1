"""The layout of ranks: the prompts of each rank, and the ranks that share an engine, a shard of weights, or a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime import process


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank. Ranks that share an engine are consecutive and take the same prompts.

    Example, 8 ranks on 2 nodes with engines of 2 ranks each:

        rank           0 1 2 3 | 4 5 6 7
        data_rank      0 0 1 1 | 2 2 3 3    index among the data_size = 4 shares of each step's prompts
        engine_place   0 1 0 1 | 0 1 0 1    index of the engine's part
        shard_group    (0 2 4 6), (1 3 5 7)  the ranks of a group have the same part of the weights, and divide it
        node           0 0 0 0 | 1 1 1 1

    With `policy_parts` 2 and `ranks_per_sequence` 2, so that 4 ranks train each row:

        row_group      (0 1 2 3), (4 5 6 7)  each group trains its own rows
        sequence_group (0 2), (1 3), (4 6), (5 7)  the ranks of a group have the same part of the policy, and each half
                       of a row's tokens
    """

    rank: int = 0
    world_size: int = 1
    ranks_per_engine: int = 1
    ranks_per_node: int = 1
    ranks_per_sequence: int = 1  # ranks that divide the tokens of a row
    policy_parts: int = 1  # ranks that hold the policy in parts: 1, or `ranks_per_engine`

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)
        assert self.world_size % self.ranks_per_engine == 0, (self.world_size, self.ranks_per_engine)
        assert self.world_size % self.ranks_per_row == 0, (self.world_size, self.ranks_per_row)
        assert self.policy_parts in (1, self.ranks_per_engine), (self.policy_parts, self.ranks_per_engine)

    @property
    def data_rank(self) -> int:
        return self.rank // self.ranks_per_engine

    @property
    def data_size(self) -> int:
        """Number of engines, which is the number of shares of the prompts."""
        return self.world_size // self.ranks_per_engine

    @property
    def engine_place(self) -> int:
        return self.rank % self.ranks_per_engine

    @property
    def engine_group(self) -> tuple[int, ...]:
        first = self.rank - self.engine_place
        return tuple(range(first, first + self.ranks_per_engine))

    @property
    def shard_group(self) -> tuple[int, ...]:
        return tuple(range(self.engine_place, self.world_size, self.ranks_per_engine))

    @property
    def ranks_per_row(self) -> int:
        """Number of consecutive ranks that train each row together, with parts of the policy or of its tokens."""
        return self.ranks_per_sequence * self.policy_parts

    @property
    def row_group(self) -> tuple[int, ...]:
        first = self.rank - self.rank % self.ranks_per_row
        return tuple(range(first, first + self.ranks_per_row))

    @property
    def sequence_group(self) -> tuple[int, ...]:
        return self.row_group[self.rank % self.policy_parts :: self.policy_parts]

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def nodes(self) -> int:
        """Number of machines. All have the same number of ranks."""
        return self.world_size // self.ranks_per_node

    @property
    def leads_node(self) -> bool:
        """Whether this rank writes the files that each node writes once."""
        return self.rank % self.ranks_per_node == 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files that a run writes once."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a rank runs, read from its launcher's variables and its device."""

    host: str
    local_rank: int
    ranks_per_node: int
    device: str = ""  # the GPU's UUID; empty on a CPU

    @classmethod
    def here(cls, device: torch.device) -> Place:
        gpu_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(socket.gethostname(), int(os.environ.get("LOCAL_RANK") or 0), process.local_world_size(), gpu_uuid)


def check_places(places: Sequence[Place]) -> None:
    """Raise ValueError unless each node has equally many, consecutive ranks, and each rank has its own device."""
    if len(places) == 1:
        return
    sizes = {place.ranks_per_node for place in places}
    if len(sizes) > 1 or len(places) % min(sizes):
        counts = ", ".join(dict.fromkeys(f"{place.ranks_per_node} on {place.host}" for place in places))
        raise ValueError(
            f"The nodes have different numbers of ranks (LOCAL_WORLD_SIZE: {counts}; {len(places)} in all). Start the "
            "same number of ranks on every node (`torchrun --nproc-per-node`, `srun --ntasks-per-node`)."
        )
    size = sizes.pop()
    for rank, place in enumerate(places):
        first = rank - rank % size
        if place.local_rank != rank % size or place.host != places[first].host:
            raise ValueError(
                f"Rank {rank} is local rank {place.local_rank} on {place.host}, but a node's {size} ranks "
                f"(LOCAL_WORLD_SIZE) must be consecutive, here {first} to {first + size - 1} on "
                f"{places[first].host}. Set RANK, LOCAL_RANK and LOCAL_WORLD_SIZE as `torchrun` does (with `srun`: "
                "`--distribution=block`)."
            )
    rank_of_device: dict[str, int] = {}
    for rank, place in enumerate(places):
        other = rank_of_device.setdefault(place.device, rank) if place.device else rank
        if other != rank:
            raise ValueError(
                f"Ranks {other} and {rank} have the same GPU of {place.host}, but each rank needs its own GPU. "
                "Start at most as many ranks on a node as it has GPUs, and check CUDA_VISIBLE_DEVICES."
            )


def check_engines(layout: RankLayout, places: Sequence[Place]) -> None:
    """Raise ValueError, the same on all ranks, unless the ranks of each engine are on one machine."""
    size, on_node = layout.ranks_per_engine, layout.ranks_per_node
    for first in range(0, layout.world_size if size > 1 else 0, size):
        engine_places = places[first : first + size]
        if len({(rank // on_node, place.host) for rank, place in enumerate(engine_places, start=first)}) > 1:
            hosts = sorted({place.host for place in engine_places})
            raise ValueError(
                f"vllm_tensor_parallel_size is {size}, but the ranks {first} to {first + size - 1} of one engine are "
                f"on different machines ({', '.join(hosts)}). Start a multiple of {size} consecutive ranks on each "
                "machine."
            )
