"""The stages between prompts and scored groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..batch import Group, Logged, Prompt, ScoredGroup
from ..engine.sampling import Sampling
from ..rewards import Ready
from ..rewards.values import with_logged_riders
from .checks import checked_groups
from .store import RewardedGroup, RolloutStore


class RolloutSource(Protocol):
    """Writes completions: `Engine`, `Conversations`, `CustomRollouts`, or a class of the user's."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Yield each prompt's `Group` (usually ``sampling.n`` rollouts) when its last rollout ends, in any order.

        Closing the generator early aborts the other prompts.

        Args:
            version: the optimizer step of the weights, recorded in each rollout.
            seed: the run's seed. Together with ``purpose`` and a prompt's position it seeds the prompt's requests.
            purpose: `train` or `eval`.
        """


class PendingRewards(Protocol):
    """Rewards that are being computed: `rewards.Scoring`, or `rewards.Ready`."""

    def done(self) -> bool:
        """Return whether `result` returns at once."""

    def cancel(self) -> object:
        """Cancel the computation, as the result isn't needed any more."""

    def result(self) -> torch.Tensor:
        """Wait for the rewards. Return them as [completions, R] float32, NaN where a function abstained."""


BeginScore = Callable[[Sequence[Group]], PendingRewards]  # begins to score several groups in one call


@dataclass(eq=False)
class InScoring:
    """The rewards of a round's groups: recorded rewards, and pending ones."""

    stages: Stages
    prompts: Sequence[Prompt]  # the round's; their recorded groups are read

    def __post_init__(self) -> None:
        journal = self.stages.journal
        # By position, until they get advantages.
        self.rewarded: dict[int, RewardedGroup] = {} if journal is None else journal.recall(self.prompts)
        self._pending: dict[int, tuple[Group, PendingRewards]] = {}  # by position

    def sample(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        """Yield groups to score: first recorded ones that are scored again, then generated ones, in any order."""
        journal = self.stages.journal
        recorded = journal.recall_samples(prompts) if journal is not None else []
        yield from recorded
        positions = {group.position for group in recorded}
        if rest := [prompt for prompt in prompts if prompt.position not in positions]:
            generated: Any = self.stages.generate(rest)
            with contextlib.closing(checked_groups(generated, rest) if self.stages.checks else generated) as groups:
                yield from groups

    def score_together(self, groups: Sequence[Group]) -> None:
        """Score groups in one call, and wait for the rewards."""
        rewards = self.stages.begin_score(groups).result().split([len(group.rollouts) for group in groups])
        self._pending |= {group.position: (group, Ready(own)) for group, own in zip(groups, rewards, strict=True)}
        self.take()

    def take(self, group: Group | None = None, position: int | None = None) -> None:
        """Begin to score a group, if there is one. Write the groups that have their rewards into the journal."""
        stages = self.stages
        if group is not None:
            self._pending[group.position] = (group, stages.begin_score([group]))
        for at, (scored, pending) in [*self._pending.items()]:
            if at == position or pending.done():
                del self._pending[at]
                rewards, logged = pending.result(), stages.take_logged(at)
                if logged.columns:
                    scored = with_logged_riders(scored, logged)
                if stages.take_turns is not None:
                    scored = stages.take_turns(scored)
                self.rewarded[at] = RewardedGroup(scored, rewards, logged)
                if stages.journal is not None:
                    stages.journal.add(self.rewarded[at])

    def scored(self, position: int) -> ScoredGroup:
        """Wait for the rewards of the group at a position. Return the group with its advantages."""
        if position not in self.rewarded:
            self.take(position=position)
        recorded = self.rewarded.pop(position)
        # A copy of the rewards, as a subclass may change them.
        advantages = self.stages.compute_advantages(recorded.group, recorded.rewards.clone())
        return ScoredGroup(recorded.group, recorded.rewards, advantages, recorded.logged)

    def cancel(self) -> None:
        """Cancel the pending rewards."""
        for _, pending in self._pending.values():
            pending.cancel()


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions that lead from prompts to scored groups, in training or in an evaluation."""

    generate: Callable[[Sequence[Prompt]], Iterable[Group]]  # one group per prompt, in any order
    begin_score: BeginScore
    compute_advantages: Callable[[Group, torch.Tensor], torch.Tensor]  # takes a group and its rewards [G, R]
    # Position of a group with rewards -> the values that reward functions logged for it.
    take_logged: Callable[[int], Logged] = lambda position: Logged({}, {})
    take_turns: Callable[[Group], Group] | None = None  # adds rewards of single answers to a group
    journal: RolloutStore | None = None
    checks: bool = True  # whether ``generate`` is the user's, so that its groups are checked
    scoring: Callable[[Stages, Sequence[Prompt]], InScoring] = InScoring  # an extension may derive its own
