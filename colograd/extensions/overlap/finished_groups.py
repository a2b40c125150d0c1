"""Finished groups of a step, trained before its last group is sampled.

`OwnGroups` holds this rank's groups, which it trains between the steps of its engine. `FinishedGroups` also passes
groups between ranks. It tracks which ranks have sampled, which groups are finished, and which rank takes a group.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class OwnGroups:
    """This rank's finished groups of the step that is trained next. No other rank takes them.

    Args:
        accepts: returns whether a group is trained at all, and may be trained before all groups are sampled.
    """

    is_wanted = False  # whether a rank that has finished sampling looks for groups

    def __init__(self, accepts: Callable[[ScoredGroup], bool]) -> None:
        self.accepts = accepts

    def begin(self, positions: Iterable[int]) -> None:
        """Begin a round. This rank's groups at ``positions`` are trained next."""
        self._positions = set(positions)
        self._own: list[ScoredGroup] = []  # this rank's accepted groups, in the order of finishing
        self._known: set[int] = set()  # positions of finished groups, accepted or not
        self._left: set[int] = set()  # indices of the groups in `_own` that no rank is known to have taken

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

    @property
    def tokens_left(self) -> int:
        """Tokens of this rank's groups that no rank is known to have taken."""
        return sum(tokens_of(self._own[index]) for index in self._left)

    def take_own(self, budget: int) -> list[ScoredGroup]:
        """Take this rank's groups for a row of ``budget`` tokens, the largest first. A group above it comes alone."""
        taken: list[ScoredGroup] = []
        for index in sorted(self._left, key=lambda index: -tokens_of(self._own[index])):
            size = tokens_of(self._own[index])
            if size > budget and taken:
                continue
            self._left.discard(index)
            if self._claims(index):
                taken.append(self._own[index])
                budget -= size
        return taken

    def _claims(self, index: int) -> bool:
        """Return whether this rank is the first to take its own group ``index``."""
        return True

    def serve(self) -> None:
        """Serve other ranks between two steps of the engine."""

    def finish(self) -> None:
        """Note that this rank samples no more, for whatever reason."""


class FinishedGroups(OwnGroups):
    """The finished groups of all ranks.

    Args:
        layout: this rank's place among all ranks.
        between_engines: whether a rank may take groups that another engine sampled (`balance_ranks`).
        accepts: see `OwnGroups`.
    """

    def __init__(self, layout: RankLayout, between_engines: bool, accepts: Callable[[ScoredGroup], bool]) -> None:
        super().__init__(accepts)
        self.layout, self.between_engines = layout, between_engines
        engines = range(0, layout.world_size, layout.ranks_per_engine)
        owners = [*engines] if between_engines else [layout.engine_group[0]]
        self._others = [owner for owner in owners if owner != layout.rank]  # may have groups for this rank
        self._wanted = "all" if between_engines else str(layout.data_rank)
        self._number, self._round = next(_numbers), 0

    def begin(self, positions: Iterable[int]) -> None:
        """See `OwnGroups.begin`. All ranks begin the same rounds, with a collective between two rounds."""
        notes = self._notes() if self._round else []
        self._round += 1
        super().begin(positions)
        self.is_wanted = False
        self._offered = 0  # number of groups offered in the store: the first ones of `_own`
        self._sizes: list[int] = []  # tokens of each offered group; 0: other ranks can't take it
        self._gone: set[tuple[int, int]] = set()  # (owner, index) of other ranks' groups that were taken
        self._is_sampled = self._is_hungry = self._is_last = False
        self._looked = 0.0
        for note in notes:
            self._store().delete_key(note)

    # -- a rank that still samples

    def serve(self) -> None:
        """Offer finished groups between two steps of the engine, if another rank wants them.

        Most calls only read a clock.
        """
        now = time.monotonic()
        if now - self._looked < EVERY or self._offered == len(self._own):
            return
        self._looked = now
        if self._count(f"wanted/{self._wanted}", 0):
            self.is_wanted = True
            self._offer()

    def take_own(self, budget: int) -> list[ScoredGroup]:
        """See `OwnGroups.take_own`. Other ranks may take an offered group first."""
        taken = super().take_own(budget)
        if self._offered and taken:
            self._tell_sizes()  # other ranks see the remaining groups
        return taken

    def _claims(self, index: int) -> bool:
        if index >= self._offered:
            return True
        self._sizes[index] = 0
        if not self._claim(self.layout.rank, index):
            return False
        self._store().delete_key(self._key(f"group/{self.layout.rank}/{index}"))
        return True

    def _offer(self) -> None:
        for index, scored in enumerate(self._own[self._offered :], start=self._offered):
            content = _content(scored) if index in self._left else b""
            if content:
                self._store().set(self._key(f"group/{self.layout.rank}/{index}"), content)
            self._sizes.append(tokens_of(scored) if content else 0)
        if self._offered < len(self._own):
            self._offered = len(self._own)
            self._tell_sizes()

    def _tell_sizes(self) -> None:
        self._store().set(self._key(f"sizes/{self.layout.rank}"), json.dumps(self._sizes))

    # -- a rank that has finished sampling

    def finish(self) -> None:
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
        """Take groups for a row of ``budget`` tokens, this rank's own first. A group above the budget comes alone.

        When all ranks have sampled, take at most a share of one rank's remaining groups, so that all ranks end at the
        same time.
        """
        hungry = self._count(f"wanted/{self._wanted}", 0)
        if self._own and hungry:
            self._offer()
        shares = 1 + max(hungry, 1) if self.all_sampled() else 0
        taken = self.take_own(min(budget, self.tokens_left // shares) if shares else budget)
        if not taken:
            self._ask()
            taken = self._take_others(budget, shares)
        return taken

    def _take_others(self, budget: int, shares: int) -> list[ScoredGroup]:
        taken: list[ScoredGroup] = []
        offers = {owner: self._sizes_of(owner) for owner in self._others}
        free = {
            owner: [i for i, size in enumerate(sizes) if size and (owner, i) not in self._gone]
            for owner, sizes in offers.items()
        }
        most = max((sum(offers[owner][index] for index in left) for owner, left in free.items()), default=0)
        room = min(budget, most // shares) if shares else budget
        for owner in sorted(free, key=lambda owner: -len(free[owner])):
            for index in sorted(free[owner], key=lambda index: -offers[owner][index]):
                if offers[owner][index] > room and taken:
                    continue
                self._gone.add((owner, index))
                if not self._claim(owner, index):
                    continue
                key = self._key(f"group/{owner}/{index}")
                taken.append(pickle.loads(self._store().get(key)))
                self._store().delete_key(key)
                room -= offers[owner][index]
                if room <= 0:
                    return taken
        return taken

    def _ask(self) -> None:
        if not self._is_hungry and self._others:
            self._is_hungry = True
            self._count(f"wanted/{self._wanted}", 1)

    def _claim(self, owner: int, index: int) -> bool:
        """Return whether this rank is the first to take an offered group."""
        return self._count(f"taken/{owner}/{index}", 1) == 1

    def _sizes_of(self, owner: int) -> Sequence[int]:
        """Return the tokens of each group that a rank offers. 0: the group can't be taken."""
        key = self._key(f"sizes/{owner}")
        return json.loads(self._store().get(key)) if self._store().check([key]) else []

    # -- notes

    def _count(self, name: str, more: int) -> int:
        return int(self._store().add(self._key(name), more))

    def _key(self, name: str) -> str:
        return f"colograd/finished/{self._number}/{self._round}/{name}"

    def _notes(self) -> list[str]:
        """Return the keys of this rank's notes of the round. The first rank also returns the shared keys."""
        me = self.layout.rank
        names = [f"{kind}/{me}/{index}" for index in range(self._offered) for kind in ("group", "taken")]
        names += [f"sizes/{me}"] if self._offered else []
        if me == 0:
            names += ["sampled", "training", "wanted/all"]
        if not self.layout.engine_place and not self.between_engines:
            names.append(f"wanted/{self.layout.data_rank}")
        return [*map(self._key, names)]

    @staticmethod
    def _store() -> Any:
        return dist.distributed_c10d._get_default_store()


def _content(scored: ScoredGroup) -> bytes:
    """Return a group's bytes for another rank. Empty: the group stays, as it or its pictures are too large."""
    rollouts = scored.group.rollouts
    if any(rollout.all(Media) or rollout.input.media is not None for rollout in rollouts):
        return b""
    content = pickle.dumps(scored.for_training())
    return content if len(content) <= LARGEST else b""
