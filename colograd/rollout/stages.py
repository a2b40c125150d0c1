"""`Stages`: the functions that turn prompts into scored groups.

`RolloutSource`: the interface of objects that generate completions."""

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
    """An object that generates completions for prompts, such as the vLLM engine. Users may write their own."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Yield one `Group` of completions per prompt, in any order. A group usually has ``sampling.n`` completions.

        The trainer closes the generator early if it needs no more groups. Then the source must abort its
        unfinished prompts.

        Args:
            version: optimizer step of the weights to generate with.
            seed: the run's seed. The vLLM engine derives a prompt's seed from ``seed``, ``purpose`` and its position.
            purpose: `train`, or `eval` for an evaluation.
        """


class PendingRewards(Protocol):
    """Rewards that may be incomplete until `result` returns. A `concurrent.futures.Future` fits this protocol."""

    def done(self) -> bool:
        """Return whether all rewards are computed."""

    def cancel(self) -> object:
        """Cancel calls of reward functions that haven't begun, and ignore the results of running calls."""

    def result(self) -> torch.Tensor:
        """Wait for all rewards. Return float32 [completions, reward functions]. NaN means no reward."""


BeginScore = Callable[[Sequence[Group]], PendingRewards]


@dataclass(eq=False)
class InScoring:
    stages: Stages
    prompts: Sequence[Prompt]

    def __post_init__(self) -> None:
        journal = self.stages.journal
        # Prompt's position -> group with rewards, until `scored` computes the group's advantages.
        self.rewarded: dict[int, RewardedGroup] = {} if journal is None else journal.recall(self.prompts)
        self._pending: dict[int, tuple[Group, PendingRewards]] = {}
        self._scored: list[ScoredGroup] = []
        self._signals = 0

    def sample(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        """Yield one group per prompt. The groups have no rewards yet.

        With `rescore: true`, recorded groups to score again come first. Then the remaining prompts are sampled."""
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
        """Begin to score ``group``. Then move each group with complete rewards to `rewarded`.

        If ``position`` is set, wait for the rewards of the group at this position."""
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
        """Compute advantages in the order of the prompts. Return all groups with advantages, also of earlier calls.

        Without ``wait``, stop at the first prompt without rewards. In any case stop when `has_enough` is true."""
        for position in [prompt.position for prompt in self.prompts[len(self._scored) :]]:
            if self.has_enough or not (wait or position in self.rewarded):
                break
            if position not in self.rewarded:
                self.take(position=position)
            recorded = self.rewarded.pop(position)
            # A copy, because an overridden `compute_advantages` may change the rewards in place.
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
    # Position of a group's prompt -> values that reward functions logged for the group.
    take_logged: Callable[[int], Logged] = lambda position: Logged({}, {})
    journal: RolloutStore | None = None
    checks: bool = True  # Whether to check generated groups, because user code may make them.
    scoring: Callable[[Stages, Sequence[Prompt]], InScoring] = InScoring
    # Number of groups with an advantage other than 0 that dynamic sampling still needs. Groups are counted in the
    # order of their prompts, and the prompts after the last needed group are skipped.
    enough: float = math.inf
