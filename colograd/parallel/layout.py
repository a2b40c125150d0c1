"""The layout of ranks: which prompts a rank gets, and which ranks share a vLLM engine, parts of weights, or a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime import process


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The position of one rank among all ranks. Ranks of one vLLM engine are consecutive, and sample the same prompts.

    Example: 8 ranks on 2 nodes, with vLLM engines of 2 ranks (tensor parallel):

        rank           0 1 2 3 | 4 5 6 7
        data_rank      0 0 1 1 | 2 2 3 3    index of the engine; each engine samples 1 / data_size of a step's prompts
        engine_place   0 1 0 1 | 0 1 0 1    index of the rank in its engine
        shard_group    (0 2 4 6), (1 3 5 7)  ranks with equal `engine_place`, one per engine
        node           0 0 0 0 | 1 1 1 1

    With `policy_parts` 2 (tensor parallel) and `ranks_per_sequence` 2 (sequence parallel), 4 ranks train each row:

        row_group      (0 1 2 3), (4 5 6 7)  the ranks that train a row together
        sequence_group (0 2), (1 3), (4 6), (5 7)  ranks with the same policy part, which divide a row's tokens"""

    rank: int = 0
    world_size: int = 1
    ranks_per_engine: int = 1
    ranks_per_node: int = 1
    ranks_per_sequence: int = 1  # Number of ranks that divide the tokens of a row (sequence parallel).
    policy_parts: int = 1  # Number of ranks that hold parts of the policy (tensor parallel): 1, or `ranks_per_engine`.

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
        return self.world_size // self.ranks_per_node

    @property
    def leads_node(self) -> bool:
        """Whether this rank is the first of its node. The first rank writes the files that each node needs once."""
        return self.rank % self.ranks_per_node == 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Place:
    host: str
    local_rank: int
    ranks_per_node: int
    device: str = ""  # UUID of the GPU

    @classmethod
    def here(cls, device: torch.device) -> Place:
        gpu_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(socket.gethostname(), int(os.environ.get("LOCAL_RANK") or 0), process.local_world_size(), gpu_uuid)


def check_places(places: Sequence[Place]) -> None:
    if len(places) == 1:
        return
    sizes = {place.ranks_per_node for place in places}
    if len(sizes) > 1 or len(places) % min(sizes):
        counts = ", ".join(dict.fromkeys(f"{place.ranks_per_node} on {place.host}" for place in places))
        raise ValueError(
            f"The nodes have different numbers of ranks (LOCAL_WORLD_SIZE: {counts}; total: {len(places)}). Start "
            "equally many ranks on every node (`torchrun --nproc-per-node`, `srun --ntasks-per-node`)."
        )
    size = sizes.pop()
    for rank, place in enumerate(places):
        first = rank - rank % size
        if place.local_rank != rank % size or place.host != places[first].host:
            raise ValueError(
                f"Rank {rank} is local rank {place.local_rank} on {place.host}. The {size} ranks of a node "
                f"(LOCAL_WORLD_SIZE) must be consecutive: {first} to {first + size - 1} on {places[first].host}. Set "
                "RANK, LOCAL_RANK and LOCAL_WORLD_SIZE as `torchrun` does. With `srun`, use `--distribution=block`."
            )
    rank_of_device: dict[str, int] = {}
    for rank, place in enumerate(places):
        other = rank_of_device.setdefault(place.device, rank) if place.device else rank
        if other != rank:
            raise ValueError(
                f"Ranks {other} and {rank} have the same GPU of {place.host}, but no two ranks may share a GPU. Start "
                "at most as many ranks on a node as the node has GPUs, and check CUDA_VISIBLE_DEVICES."
            )


def check_engines(layout: RankLayout, places: Sequence[Place]) -> None:
    size, on_node = layout.ranks_per_engine, layout.ranks_per_node
    for first in range(0, layout.world_size if size > 1 else 0, size):
        engine_places = places[first : first + size]
        if len({(rank // on_node, place.host) for rank, place in enumerate(engine_places, start=first)}) > 1:
            hosts = sorted({place.host for place in engine_places})
            raise ValueError(
                f"vllm_tensor_parallel_size is {size}, but the ranks {first} to {first + size - 1} of one vLLM engine "
                f"are on different machines ({', '.join(hosts)}). Start a multiple of {size} ranks, with consecutive "
                "numbers, on each machine."
            )
