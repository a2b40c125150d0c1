"""Finished groups of the next step: which groups are finished, which ranks have sampled, which rank takes a group.

A rank that decodes can't take part in a collective. So ranks leave short notes and the bytes of groups in torch's
rendezvous store, and a counter there decides who takes a group. Nothing is sent until a rank has sampled and trained
its own groups and looks for more.
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

_numbers = itertools.count(1)  # numbers of this process's objects: all ranks make them in the same order
EVERY = 0.1  # seconds between two looks for ranks that want groups
LARGEST = 4 * 2**20  # maximum bytes of an offered group: torch's store closes a connection that sends 8 MiB


def tokens_of(scored: ScoredGroup) -> int:
    """Count the tokens of a group in a row: its prompt and its completions."""
    rollouts = scored.group.rollouts
    return len(rollouts[0].input) + sum(len(rollout.completion_ids) for rollout in rollouts)


class FinishedGroups:
    """The finished groups of all ranks of the step that is trained next.

    Args:
        layout: this rank's place among all ranks.
        between_engines: whether a rank may take groups that another engine sampled (`balance_ranks`).
        accepts: returns whether a group is trained at all, and may be trained before all groups are sampled.
    """

    def __init__(self, layout: RankLayout, between_engines: bool, accepts: Callable[[ScoredGroup], bool]) -> None:
        self.layout, self.between_engines, self.accepts = layout, between_engines, accepts
        engines = range(0, layout.world_size, layout.ranks_per_engine)
        owners = [*engines] if between_engines else [layout.engine_group[0]]
        self._others = [owner for owner in owners if owner != layout.rank]  # may have groups for this rank
        self._wanted = "wanted/all" if between_engines else f"wanted/{layout.data_rank}"
        self._number, self._round, self._offered = next(_numbers), 0, 0

    def begin(self, positions: Iterable[int]) -> None:
        """Begin a round in which this rank's groups at ``positions`` are trained next.

        All ranks begin the same rounds, with a collective between two rounds.
        """
        if self._round:  # delete this rank's notes; the first rank and an engine's first also delete shared ones
            rank, first_of_engine = self.layout.rank, not self.layout.engine_place
            notes = [f"{kind}/{rank}/{index}" for index in range(self._offered) for kind in ("group", "taken")]
            notes += [f"sizes/{rank}"] if self._offered else []
            notes += ["sampled", "training"] if rank == 0 else []
            notes += [self._wanted] if rank == 0 or (first_of_engine and not self.between_engines) else []
            for note in notes:
                self._store().delete_key(self._key(note))
        self._round += 1
        self._positions = set(positions)
        self._own: list[ScoredGroup] = []  # this rank's accepted groups, in the order of finishing
        self._known: set[int] = set()  # positions of finished groups, accepted or not
        self._offered = 0  # number of groups offered in the store: the first ones of `_own`
        self._sizes: list[int] = []  # tokens of each offered group; 0: other ranks can't take it
        self._gone: set[tuple[int, int]] = set()  # (owner, index) of groups that this rank knows to be taken
        self._is_sampled = self._is_hungry = self._is_last = False
        self._looked = 0.0

    def add(self, scored: ScoredGroup) -> None:
        if self.wants(scored.group.position):
            self._known.add(scored.group.position)
            if self.accepts(scored):
                self._own.append(scored)

    def wants(self, position: int) -> bool:
        """Return whether the group at a position is trained next and isn't added yet."""
        return position in self._positions and position not in self._known

    def serve(self) -> None:
        """Offer finished groups between two steps of the engine, if another rank wants them.

        Most calls only read a clock.
        """
        now = time.monotonic()
        if now - self._looked < EVERY or self._offered == len(self._own):
            return
        self._looked = now
        if self._count(self._wanted, 0):
            self._offer()

    def _offer(self) -> None:
        if self._offered == len(self._own):
            return
        for index, scored in enumerate(self._own[self._offered :], start=self._offered):
            rollouts = scored.group.rollouts
            content = b""  # nothing: the group stays, as it is taken, or it or its pictures are too large
            is_left = (self.layout.rank, index) not in self._gone
            if is_left and not any(r.all(Media) or r.input.media is not None for r in rollouts):
                content = pickle.dumps(scored.for_training())
            if is_sent := 0 < len(content) <= LARGEST:
                self._store().set(self._key(f"group/{self.layout.rank}/{index}"), content)
            self._sizes.append(tokens_of(scored) if is_sent else 0)
        self._offered = len(self._own)
        self._tell_sizes()

    def finish(self) -> None:
        """Note that this rank samples no more, for whatever reason."""
        if not self._is_sampled:
            self._is_sampled = True
            self._count("sampled", 1)

    def all_sampled(self) -> bool:
        self._is_last = self._is_last or self._count("sampled", 0) >= self.layout.world_size
        return self._is_last

    def is_over(self) -> bool:
        """Return whether no rank samples any more, and no rank trains groups that it has taken."""
        return self.all_sampled() and self._count("training", 0) <= 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        self._count("training", 1)
        try:
            yield
        finally:
            self._count("training", -1)

    def take(self, budget: int) -> list[ScoredGroup]:
        """Take groups for a row of ``budget`` tokens, this rank's own and the largest first. A group above the budget
        comes alone.

        When all ranks have sampled, take at most a share of one rank's remaining groups, so that all ranks end at the
        same time.
        """
        hungry = self._count(self._wanted, 0)
        if hungry:
            self._offer()
        shares = 1 + max(hungry, 1) if self.all_sampled() else 0
        left = {i: tokens_of(own) for i, own in enumerate(self._own) if (self.layout.rank, i) not in self._gone}
        taken = self._take({self.layout.rank: left}, budget, shares)
        if self._offered and taken:
            self._tell_sizes()  # other ranks see the remaining groups
        if not taken:
            if not self._is_hungry and self._others:
                self._is_hungry = True
                self._count(self._wanted, 1)
            taken = self._take({owner: self._free_of(owner) for owner in self._others}, budget, shares)
        return taken

    def _free_of(self, owner: int) -> dict[int, int]:
        """Return the tokens of each group that another rank offers, by index."""
        key = self._key(f"sizes/{owner}")
        sizes = json.loads(self._store().get(key)) if self._store().check([key]) else []
        return {index: size for index, size in enumerate(sizes) if size and (owner, index) not in self._gone}

    def _take(self, free: dict[int, dict[int, int]], budget: int, shares: int) -> list[ScoredGroup]:
        """Take groups of these owners, by owner and index with their tokens."""
        most = max((sum(sizes.values()) for sizes in free.values()), default=0)
        room = min(budget, most // shares) if shares else budget
        taken: list[ScoredGroup] = []
        for owner in sorted(free, key=lambda owner: -len(free[owner])):
            for index, size in sorted(free[owner].items(), key=lambda each: -each[1]):
                if taken and size > room:
                    continue
                self._gone.add((owner, index))
                is_own, key = owner == self.layout.rank, self._key(f"group/{owner}/{index}")
                if is_own and index >= self._offered:  # nobody else can take it
                    taken.append(self._own[index])
                elif self._count(f"taken/{owner}/{index}", 1) == 1:  # this rank is the first to take it
                    taken.append(self._own[index] if is_own else pickle.loads(self._store().get(key)))
                    self._store().delete_key(key)
                else:
                    continue
                room -= size
        return taken

    def _tell_sizes(self) -> None:
        sizes = [0 if (self.layout.rank, index) in self._gone else size for index, size in enumerate(self._sizes)]
        self._store().set(self._key(f"sizes/{self.layout.rank}"), json.dumps(sizes))

    def _count(self, name: str, more: int) -> int:
        return int(self._store().add(self._key(name), more))

    def _key(self, name: str) -> str:
        return f"colograd/finished/{self._number}/{self._round}/{name}"

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()
