"""Sharing of finished groups between ranks while some ranks still sample.

A rank that decodes can't take part in a collective. So ranks write groups to torch's rendezvous store, and a counter in
the store decides which rank takes a group. No group is written before a rank wants groups of other ranks. A group with
images, or with more than `LARGEST` bytes, is never written: during sampling only its own rank can train it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist

from ...batch import ScoredGroup
from ...parallel.layout import RankLayout
from ...riders import Media

_numbers = itertools.count(1)  # Numbers the `FinishedGroups` objects for keys in the store, equally on all ranks.
EVERY = 0.1  # Minimum seconds between two checks whether another rank wants groups.
LARGEST = 4 * 2**20  # Maximum bytes of an offered group, because torch's store closes a connection that sends 8 MiB.


def tokens_of(scored: ScoredGroup) -> int:
    rollouts = scored.group.rollouts
    return len(rollouts[0].input) + sum(len(rollout.completion_ids) for rollout in rollouts)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


class FinishedGroups:
    """Sampled and scored groups of the next optimizer step. ``between_engines``: whether ranks of other engines
    may take groups (`balance_ranks`). ``accepts`` decides which groups may be trained before all groups are sampled."""

    def __init__(self, layout: RankLayout, between_engines: bool, accepts: Callable[[ScoredGroup], bool]) -> None:
        self.layout, self.between_engines, self.accepts = layout, between_engines, accepts
        engines = range(0, layout.world_size, layout.ranks_per_engine)
        owners = [*engines] if between_engines else [layout.engine_group[0]]
        self._others = [owner for owner in owners if owner != layout.rank]  # Ranks that may have groups for this rank.
        self._wanted = "wanted/all" if between_engines else f"wanted/{layout.data_rank}"
        self._number, self._round, self._offered = next(_numbers), 0, 0
        self._store: dist.Store = _store()  # During a round: the store with a key prefix for the round.

    def begin(self, positions: Iterable[int]) -> None:
        """Begin a round of sampling. Between two rounds all ranks must meet in a collective."""
        if self._round:  # Delete this rank's keys of the last round. First ranks also delete keys that ranks share.
            rank, first_of_engine = self.layout.rank, not self.layout.engine_place
            keys = [f"{kind}/{rank}/{index}" for index in range(self._offered) for kind in ("group", "taken")]
            keys += [f"sizes/{rank}"] if self._offered else []
            keys += ["sampled", "training"] if rank == 0 else []
            keys += [self._wanted] if rank == 0 or (first_of_engine and not self.between_engines) else []
            for key in keys:
                self._store.delete_key(key)
        self._round += 1
        self._store = dist.PrefixStore(f"colograd/finished/{self._number}/{self._round}", _store())
        self._positions = set(positions)
        self._own: list[ScoredGroup] = []  # This rank's accepted groups, in the order of finishing.
        self._known: set[int] = set()  # Positions of finished groups, whether accepted or not.
        self._offered = 0  # `_offer` has handled the first `_offered` groups of `_own`.
        self._sizes: list[int] = []  # Tokens of each of these groups. 0: `_offer` didn't write it to the store.
        self._gone: set[tuple[int, int]] = set()  # (owner's rank, index in owner's `_own`) of groups known as taken.
        self._is_hungry = False
        self._looked = 0.0

    def add(self, scored: ScoredGroup) -> None:
        if self.wants(scored.group.position):
            self._known.add(scored.group.position)
            if self.accepts(scored):
                self._own.append(scored)

    def wants(self, position: int) -> bool:
        return position in self._positions and position not in self._known

    def serve(self) -> None:
        """Write this rank's finished groups to the store if another rank wants groups."""
        now = time.monotonic()
        if now - self._looked < EVERY or self._offered == len(self._own):
            return
        self._looked = now
        if self._store.add(self._wanted, 0):
            self._offer()

    def _offer(self) -> None:
        if self._offered == len(self._own):
            return
        for index, scored in enumerate(self._own[self._offered :], start=self._offered):
            rollouts = scored.group.rollouts
            content = b""  # Stays empty for a taken group or one with images: it isn't offered.
            is_left = (self.layout.rank, index) not in self._gone
            if is_left and not any(r.all(Media) or r.input.media is not None for r in rollouts):
                content = pickle.dumps(scored.for_training())
            if is_sent := 0 < len(content) <= LARGEST:
                self._store.set(f"group/{self.layout.rank}/{index}", content)
            self._sizes.append(tokens_of(scored) if is_sent else 0)
        self._offered = len(self._own)
        self._tell_sizes()

    def finish(self) -> None:
        self._store.add("sampled", 1)

    def all_sampled(self) -> bool:
        return bool(self._store.add("sampled", 0) >= self.layout.world_size)

    def is_over(self) -> bool:
        return self.all_sampled() and self._store.add("training", 0) <= 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        self._store.add("training", 1)
        try:
            yield
        finally:
            self._store.add("training", -1)

    def take(self, budget: int) -> list[ScoredGroup]:
        """Take groups for a row of ``budget`` tokens. Other ranks' groups are taken only if this rank has none."""
        hungry = self._store.add(self._wanted, 0)
        if hungry:
            self._offer()
        # When all ranks have sampled, take a part of a rank's groups, so that all ranks end at about the same time.
        shares = 1 + max(hungry, 1) if self.all_sampled() else 0
        left = {i: tokens_of(own) for i, own in enumerate(self._own) if (self.layout.rank, i) not in self._gone}
        taken = self._take({self.layout.rank: left}, budget, shares)
        if self._offered and taken:
            self._tell_sizes()
        if not taken:
            if not self._is_hungry and self._others:
                self._is_hungry = True
                self._store.add(self._wanted, 1)
            free = {}
            for owner in self._others:
                key = f"sizes/{owner}"
                sizes = json.loads(self._store.get(key)) if self._store.check([key]) else []
                free[owner] = {i: size for i, size in enumerate(sizes) if size and (owner, i) not in self._gone}
            taken = self._take(free, budget, shares)
        return taken

    def _take(self, free: dict[int, dict[int, int]], budget: int, shares: int) -> list[ScoredGroup]:
        """Take groups of ``free`` (owner's rank -> group's index -> tokens). Try an owner's largest groups first.

        The taken tokens have two limits: ``budget``, and 1 / ``shares`` of the tokens of the owner with most tokens.
        With ``shares`` 0 only ``budget`` limits them. The first taken group may exceed both limits."""
        most = max((sum(sizes.values()) for sizes in free.values()), default=0)
        room = min(budget, most // shares) if shares else budget
        taken: list[ScoredGroup] = []
        for owner in sorted(free, key=lambda owner: -len(free[owner])):
            for index, size in sorted(free[owner].items(), key=lambda each: -each[1]):
                if taken and size > room:
                    continue
                self._gone.add((owner, index))
                is_own, key = owner == self.layout.rank, f"group/{owner}/{index}"
                if is_own and index >= self._offered:  # Not in the store: no other rank can take the group.
                    taken.append(self._own[index])
                elif self._store.add(f"taken/{owner}/{index}", 1) == 1:
                    taken.append(self._own[index] if is_own else pickle.loads(self._store.get(key)))
                    self._store.delete_key(key)
                else:
                    continue
                room -= size
        return taken

    def _tell_sizes(self) -> None:
        sizes = [0 if (self.layout.rank, index) in self._gone else size for index, size in enumerate(self._sizes)]
        self._store.set(f"sizes/{self.layout.rank}", json.dumps(sizes))
