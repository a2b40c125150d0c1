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
        self._left: set[int] = set()  # indices of the groups in `_own` that no rank is known to have taken
        self._offered = 0  # number of groups offered in the store: the first ones of `_own`
        self._sizes: list[int] = []  # tokens of each offered group; 0: other ranks can't take it
        self._gone: set[tuple[int, int]] = set()  # (owner, index) of other ranks' groups that were taken
        self._is_sampled = self._is_hungry = self._is_last = False
        self._looked = 0.0

    # -- a rank that still samples

    def add(self, scored: ScoredGroup) -> None:
        """Add a finished group of this rank."""
        if self.wants(scored.group.position):
            self._known.add(scored.group.position)
            if self.accepts(scored):
                self._left.add(len(self._own))
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
            if index in self._left and not any(r.all(Media) or r.input.media is not None for r in rollouts):
                content = pickle.dumps(scored.for_training())
            if is_sent := 0 < len(content) <= LARGEST:
                self._store().set(self._key(f"group/{self.layout.rank}/{index}"), content)
            self._sizes.append(tokens_of(scored) if is_sent else 0)
        self._offered = len(self._own)
        self._tell_sizes()

    # -- a rank that has finished sampling

    def finish(self) -> None:
        """Note that this rank samples no more, for whatever reason."""
        if not self._is_sampled:
            self._is_sampled = True
            self._count("sampled", 1)

    def all_sampled(self) -> bool:
        """Return whether no rank samples any more."""
        self._is_last = self._is_last or self._count("sampled", 0) >= self.layout.world_size
        return self._is_last

    def is_over(self) -> bool:
        """Return whether no rank samples any more, and no rank trains groups that it has taken."""
        return self.all_sampled() and self._count("training", 0) <= 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count this rank as training while the context is open."""
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
        taken = self._take_own(budget, shares)
        if not taken:
            if not self._is_hungry and self._others:
                self._is_hungry = True
                self._count(self._wanted, 1)
            taken = self._take_others(budget, shares)
        return taken

    def _take_own(self, budget: int, shares: int) -> list[ScoredGroup]:
        sizes = {index: tokens_of(self._own[index]) for index in self._left}
        room = min(budget, sum(sizes.values()) // shares) if shares else budget
        taken: list[ScoredGroup] = []
        for index in sorted(sizes, key=lambda index: -sizes[index]):
            if sizes[index] > room and taken:
                continue
            self._left.discard(index)
            if index < self._offered:
                self._sizes[index] = 0
                if not self._claim(self.layout.rank, index):
                    continue
                self._store().delete_key(self._key(f"group/{self.layout.rank}/{index}"))
            taken.append(self._own[index])
            room -= sizes[index]
        if self._offered and taken:
            self._tell_sizes()  # other ranks see the remaining groups
        return taken

    def _take_others(self, budget: int, shares: int) -> list[ScoredGroup]:
        free: dict[int, dict[int, int]] = {}  # owner -> index -> tokens of each group that can be taken
        for owner in self._others:
            key = self._key(f"sizes/{owner}")
            sizes = json.loads(self._store().get(key)) if self._store().check([key]) else []
            free[owner] = {i: size for i, size in enumerate(sizes) if size and (owner, i) not in self._gone}
        most = max((sum(sizes.values()) for sizes in free.values()), default=0)
        room = min(budget, most // shares) if shares else budget
        taken: list[ScoredGroup] = []
        for owner in sorted(free, key=lambda owner: -len(free[owner])):
            for index, size in sorted(free[owner].items(), key=lambda each: -each[1]):
                if size > room and taken:
                    continue
                self._gone.add((owner, index))
                if not self._claim(owner, index):
                    continue
                key = self._key(f"group/{owner}/{index}")
                taken.append(pickle.loads(self._store().get(key)))
                self._store().delete_key(key)
                room -= size
                if room <= 0:
                    return taken
        return taken

    # -- notes

    def _tell_sizes(self) -> None:
        self._store().set(self._key(f"sizes/{self.layout.rank}"), json.dumps(self._sizes))

    def _claim(self, owner: int, index: int) -> bool:
        """Return whether this rank is the first to take an offered group."""
        return self._count(f"taken/{owner}/{index}", 1) == 1

    def _count(self, name: str, more: int) -> int:
        return int(self._store().add(self._key(name), more))

    def _key(self, name: str) -> str:
        return f"colograd/finished/{self._number}/{self._round}/{name}"

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()
