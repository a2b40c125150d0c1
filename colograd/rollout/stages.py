"""`Stages`: the functions that make scored groups from prompts. `RolloutSource`: the interface of generators."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..batch import Group, Logged, Prompt, ScoredGroup
from ..engine.sampling import Sampling
from ..policy.packing import has_signal
from ..rewards import Ready
from ..rewards.functions import with_logged_riders
from .checks import checked_groups
from .store import RewardedGroup, RolloutStore


class RolloutSource(Protocol):
    """A rollout source generates completions for prompts. The vLLM engine is a rollout source; users may write one."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Yield one `Group` per prompt (usually of ``sampling.n`` rollouts) when its last rollout ends, in any order.

        Closing the generator early aborts the unfinished prompts.

        Args:
            version: optimizer step of the weights that generate. Every `Rollout` records it as `policy_version`.
            seed: the run's seed. The engine's seed for a prompt depends on this seed, ``purpose`` and the position.
            purpose: `train` or `eval`.
        """


class PendingRewards(Protocol):
    """Rewards that may still be being computed, like a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""

    def cancel(self) -> object:
        """Cancel waiting calls, and drop the results of running ones."""

    def result(self) -> torch.Tensor:
        """Wait for rewards, float32 [completions, reward functions]. NaN: the function abstained."""


BeginScore = Callable[[Sequence[Group]], PendingRewards]


@dataclass(eq=False)
class InScoring:
    stages: Stages
    prompts: Sequence[Prompt]

    def __post_init__(self) -> None:
        journal = self.stages.journal
        # By position, until `scored` computes the advantages.
        self.rewarded: dict[int, RewardedGroup] = {} if journal is None else journal.recall(self.prompts)
        self._pending: dict[int, tuple[Group, PendingRewards]] = {}
        self._scored: list[ScoredGroup] = []
        self._signals = 0

    def sample(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        """Yield groups to score. Recorded groups to score again (`rescore: true`) come first."""
        stages = self.stages
        recorded = stages.journal.recall_samples(prompts) if stages.journal is not None else []
        yield from recorded
        positions = {group.position for group in recorded}
        if rest := [prompt for prompt in prompts if prompt.position not in positions]:
            generated: Any = stages.generate(rest)
            with contextlib.closing(checked_groups(generated, rest) if stages.checks else generated) as groups:
                yield from groups

    def score_together(self, groups: Sequence[Group]) -> None:
        rewards = self.stages.begin_score(groups).result().split([len(group.rollouts) for group in groups])
        self._pending |= {group.position: (group, Ready(own)) for group, own in zip(groups, rewards, strict=True)}
        self.take()

    def take(self, group: Group | None = None, position: int | None = None) -> None:
        """Start to score ``group``. Move groups with ready rewards to ``rewarded``; wait for the group at
        ``position``."""
        stages = self.stages
        if group is not None:
            self._pending[group.position] = (group, stages.begin_score([group]))
        for at, (scored, pending) in [*self._pending.items()]:
            if at == position or pending.done():
                del self._pending[at]
                rewards, logged = pending.result(), stages.take_logged(at)
                if logged.columns:
                    scored = with_logged_riders(scored, logged)
                self.rewarded[at] = RewardedGroup(scored, rewards, logged)
                if stages.journal is not None:
                    stages.journal.add(self.rewarded[at])

    @property
    def has_enough(self) -> bool:
        return self._signals >= self.stages.enough

    def scored(self, wait: bool = True) -> list[ScoredGroup]:
        """Compute advantages in the order of the prompts, and return the groups that have them.

        Without ``wait``, stop at the first prompt without rewards. Stop also when `has_enough` is true."""
        for position in [prompt.position for prompt in self.prompts[len(self._scored) :]]:
            if self.has_enough or not (wait or position in self.rewarded):
                break
            if position not in self.rewarded:
                self.take(position=position)
            recorded = self.rewarded.pop(position)
            # A subclass may change the tensor in place.
            advantages = self.stages.compute_advantages(recorded.group, recorded.rewards.clone())
            self._scored.append(ScoredGroup(recorded.group, recorded.rewards, advantages, recorded.logged))
            self._signals += has_signal(self._scored[-1])
        return self._scored

    def cancel(self) -> None:
        for _, pending in self._pending.values():
            pending.cancel()


@dataclass(frozen=True, slots=True)
class Stages:
    generate: Callable[[Sequence[Prompt]], Iterable[Group]]
    begin_score: BeginScore
    compute_advantages: Callable[[Group, torch.Tensor], torch.Tensor]
    # Position of a scored group -> values that reward functions logged for it.
    take_logged: Callable[[int], Logged] = lambda position: Logged({}, {})
    journal: RolloutStore | None = None
    checks: bool = True  # Whether user code may have made the groups.
    scoring: Callable[[Stages, Sequence[Prompt]], InScoring] = InScoring
    # Later prompts aren't needed after this number of groups with an advantage other than 0, in the prompts' order.
    enough: float = math.inf
