"""`Stages`: the functions that make scored groups from prompts: generate, score, compute advantages, record."""

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
        """Return whether the rewards are ready, so that `result` returns without waiting."""

    def cancel(self) -> object:
        """Cancel the calls of reward functions. Running calls may continue, but their results are dropped."""

    def result(self) -> torch.Tensor:
        """Wait for the rewards. Return float32 [completions, reward functions], NaN where a function abstained."""


BeginScore = Callable[[Sequence[Group]], PendingRewards]  # Function that starts to score several groups in one call.


@dataclass(eq=False)
class InScoring:
    """The groups of a round or an evaluation while they are scored, with groups from the rollout log."""

    stages: Stages
    prompts: Sequence[Prompt]  # All prompts of the round or evaluation.

    def __post_init__(self) -> None:
        journal = self.stages.journal
        # Groups that have rewards but no advantages yet, by position.
        self.rewarded: dict[int, RewardedGroup] = {} if journal is None else journal.recall(self.prompts)
        self._pending: dict[int, tuple[Group, PendingRewards]] = {}  # Groups that are being scored, by position.
        self._scored: list[ScoredGroup] = []  # Groups with advantages, in the order of the prompts.
        self._signals = 0  # Number of groups in `_scored` with an advantage other than 0.

    def sample(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        """Yield groups to score, in any order. Recorded groups that are scored again (`rescore: true`) come first."""
        stages = self.stages
        recorded = stages.journal.recall_samples(prompts) if stages.journal is not None else []
        yield from recorded
        positions = {group.position for group in recorded}
        if rest := [prompt for prompt in prompts if prompt.position not in positions]:
            generated: Any = stages.generate(rest)
            with contextlib.closing(checked_groups(generated, rest) if stages.checks else generated) as groups:
                yield from groups

    def score_together(self, groups: Sequence[Group]) -> None:
        """Score several groups in one call, wait for the rewards, and write the groups to the rollout log."""
        rewards = self.stages.begin_score(groups).result().split([len(group.rollouts) for group in groups])
        self._pending |= {group.position: (group, Ready(own)) for group, own in zip(groups, rewards, strict=True)}
        self.take()

    def take(self, group: Group | None = None, position: int | None = None) -> None:
        """Start to score ``group``, if it isn't None. Then move all groups with ready rewards to ``rewarded`` and to
        the rollout log. If ``position`` is set, wait for the rewards of the group at this position."""
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
        """Compute advantages in the order of the prompts, until `Stages.enough` groups have an advantage other than 0.
        If ``wait`` is false, end at the first prompt without rewards. Return all groups that have advantages."""
        for position in [prompt.position for prompt in self.prompts[len(self._scored) :]]:
            if self.has_enough or not (wait or position in self.rewarded):
                break
            if position not in self.rewarded:
                self.take(position=position)
            recorded = self.rewarded.pop(position)
            # Pass a copy of the rewards, because a trainer's subclass may change the tensor in place.
            advantages = self.stages.compute_advantages(recorded.group, recorded.rewards.clone())
            self._scored.append(ScoredGroup(recorded.group, recorded.rewards, advantages, recorded.logged))
            self._signals += has_signal(self._scored[-1])
        return self._scored

    def cancel(self) -> None:
        for _, pending in self._pending.values():
            pending.cancel()


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions that generate, score and record groups, in training or in an evaluation."""

    generate: Callable[[Sequence[Prompt]], Iterable[Group]]  # Function that yields one group per prompt.
    begin_score: BeginScore
    compute_advantages: Callable[[Group, torch.Tensor], torch.Tensor]  # (group, rewards [G, R]) -> advantages.
    # Function from a scored group's position to the values that reward functions logged for the group.
    take_logged: Callable[[int], Logged] = lambda position: Logged({}, {})
    journal: RolloutStore | None = None
    checks: bool = True  # Whether to check the groups of ``generate``, because user code may have made them.
    scoring: Callable[[Stages, Sequence[Prompt]], InScoring] = InScoring  # Class that scores groups.
    # Number of groups with an advantage other than 0 after which the later prompts aren't needed. Groups are counted in
    # the prompts' order, not in the order of finishing.
    enough: float = math.inf
