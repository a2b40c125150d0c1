"""One round: prompts -> scored groups. A group is scored as soon as it is whole, while the engine decodes others."""

from __future__ import annotations

import contextlib
import itertools
import math
import reprlib
import time
from collections.abc import Callable, Sequence

from ..batch import Group, Prompt, SampledStep, ScoredGroup
from ..policy.packing import has_signal
from ..reporting.metrics import PhaseTimes
from .stages import PendingRewards, Stages, checked_groups
from .store import RewardedGroup


def sample_steps(
    steps: Sequence[Sequence[Prompt]],
    stages: Stages,
    times: PhaseTimes,
    one_call: bool = False,
    max_rounds: int = 0,
    more_prompts: Callable[[int, int], list[Prompt]] | None = None,
) -> list[SampledStep]:
    """Sample and score the prompts of a round's optimizer steps, in one queue.

    Dynamic sampling (``max_rounds`` > 0; arXiv 2503.14476, section 3.2) keeps only groups with a reward difference
    and draws further prompts, at most ``max_rounds`` times, until all steps are full. Steps take kept groups in the
    order of drawing, so a step may train groups of another step's prompts.

    Args:
        one_call: see `roll_out`.
        more_prompts: (number drawn so far, number wanted) -> further prompts.
    """
    prompts = [prompt for step in steps for prompt in step]
    sampled = roll_out(prompts, stages, times, one_call)
    if not max_rounds:
        by_position = {scored.group.position: scored for scored in sampled}
        of_steps = [tuple(by_position[prompt.position] for prompt in step) for step in steps]
        return [SampledStep(groups, groups) for groups in of_steps]
    assert more_prompts is not None
    for _ in range(max_rounds):
        found = sum(map(has_signal, sampled))
        if found >= len(prompts):
            break
        # The number of prompts that is probably enough, at most ten times the number of missing groups.
        count = math.ceil((len(prompts) - found) / max(found / len(sampled), 0.1))
        more = more_prompts(len(sampled) - len(prompts), count)
        sampled += roll_out(more, stages, times, one_call, enough=len(prompts) - found)
    kept = filter(has_signal, sampled)
    return [
        SampledStep(kept=tuple(itertools.islice(kept, len(step))), sampled=tuple(sampled[index :: len(steps)]))
        for index, step in enumerate(steps)
    ]


def roll_out(
    prompts: Sequence[Prompt], stages: Stages, times: PhaseTimes, one_call: bool = False, enough: float = math.inf
) -> list[ScoredGroup]:
    """Sample and score groups. Return them in the order of the prompts, which have ascending positions.

    Scoring a group begins when its source yields it, while the source continues with the others. Reward functions in
    this process run between two engine steps. Their time, and the wait for the others, counts as ``reward``.

    Args:
        one_call: score all groups in one call, after the last one.
        enough: stop after this many groups with a reward difference, and abort the rest. They are counted in the order
            of the prompts, not in the order of finishing.
    """
    if one_call:
        return _first(_scored_together(prompts, stages, times), enough)
    scoring = InScoring(stages, prompts)
    missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
    scored: list[ScoredGroup] = []  # the first prompts' groups, without a gap
    signals = 0  # groups of `scored` with a reward difference

    def extend_scored(wait: bool) -> None:
        nonlocal signals
        for prompt in prompts[len(scored) :]:
            if signals >= enough:
                break
            if prompt.position not in scoring.rewarded and not wait:
                break
            scored.append(scoring.scored(prompt.position))
            signals += has_signal(scored[-1])

    try:
        if enough < math.inf:
            extend_scored(wait=False)
        if missing and signals < enough:
            groups = checked_groups(stages.sample(missing), missing)
            # Closing aborts the requests in flight: when there are enough groups, and when a reward function fails.
            between_steps = stages.between_steps(scoring.take_finished)
            with times.phase("generate"), between_steps, contextlib.closing(groups):
                for group in groups:
                    started = time.perf_counter()
                    scoring.begin(group)
                    scoring.take_finished()
                    if enough < math.inf:
                        extend_scored(wait=False)
                    times.move("generate", "reward", time.perf_counter() - started)
                    if signals >= enough:
                        break
        with times.phase("reward"):
            extend_scored(wait=True)
    finally:
        scoring.cancel()
    return scored


class InScoring:
    """The rewards of a round's groups: recorded rewards, and pending ones.

    Args:
        prompts: the round's prompts. Their recorded groups are read.
    """

    def __init__(self, stages: Stages, prompts: Sequence[Prompt]) -> None:
        self.stages = stages
        self.rewarded: dict[int, RewardedGroup] = stages.recall(prompts)  # by position, until they get advantages
        self._pending: dict[int, tuple[Group, PendingRewards]] = {}  # by position
        for recalled in self.rewarded.values():
            stages.finished(recalled)

    def begin(self, group: Group) -> None:
        self._pending[group.position] = (group, self.stages.begin_score([group]))

    def score_together(self, groups: Sequence[Group]) -> None:
        """Score groups in one call, and wait for the rewards."""
        if groups:
            rewards = self.stages.begin_score(groups).result().split([len(group.rollouts) for group in groups])
            for group, of_group in zip(groups, rewards, strict=True):
                self.rewarded[group.position] = self.stages.record(group, of_group)

    def take_finished(self) -> None:
        """Record the groups that have their rewards."""
        for position in [position for position, (_, pending) in self._pending.items() if pending.done()]:
            self._take(position)

    def scored(self, position: int) -> ScoredGroup:
        """Wait for the rewards of the group at a position. Return the group with its advantages."""
        if position not in self.rewarded:
            self._take(position)
            self.take_finished()
        return self.stages.with_advantages(self.rewarded.pop(position))

    def cancel(self) -> None:
        """Cancel the pending rewards."""
        for _, pending in self._pending.values():
            pending.cancel()

    def _take(self, position: int) -> None:
        group, pending = self._pending.pop(position)
        self.rewarded[position] = self.stages.record(group, pending.result())


def _scored_together(prompts: Sequence[Prompt], stages: Stages, times: PhaseTimes) -> list[ScoredGroup]:
    """Score all groups in one call. Return them in the order of the prompts. The journal has all groups, or none."""
    recorded = stages.recall(prompts)
    if len(recorded) == len(prompts):
        return [stages.with_advantages(recorded[prompt.position]) for prompt in prompts]
    with times.phase("generate"):
        groups = sorted(checked_groups(stages.sample(prompts), prompts), key=lambda group: group.position)
    with times.phase("reward"):
        if not groups:  # in an evaluation a rank may have no prompts
            return []
        rewards = stages.begin_score(groups).result().split([len(group.rollouts) for group in groups])
        rewarded = [stages.record(group, of_group) for group, of_group in zip(groups, rewards, strict=True)]
        return [stages.with_advantages(one) for one in rewarded]


def _first(groups: Sequence[ScoredGroup], enough: float) -> list[ScoredGroup]:
    """Return the groups up to the ``enough``-th one with a reward difference."""
    before = itertools.accumulate((has_signal(group) for group in groups), initial=0)  # signals before each group
    return [group for group, signals in zip(groups, before, strict=False) if signals < enough]


def unscored(steps: Sequence[SampledStep]) -> str:
    """Return a warning of the first completion that every reward function abstained from, or ""."""
    for scored in (scored for step in steps for scored in step.sampled):
        nobody = scored.rewards.isnan().all(dim=1).nonzero()
        if len(nobody) and scored.rewards.shape[1]:  # else there are no reward functions
            row = {name: value for name, value in scored.group.example.items() if name != "prompt"}
            return (
                f"rewards: every reward function abstained for completion {int(nobody[0])} of the prompt "
                f"{reprlib.repr(scored.group.example.get('prompt'))} with {reprlib.repr(row)}: it isn't trained on "
                "(said once; `rewards/<name>/abstained` counts on)"
            )
    return ""
