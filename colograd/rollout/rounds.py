"""One round: prompts -> scored groups. A group is scored as soon as it is whole, while others are still decoded."""

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
from .journal import Recorded
from .stages import PendingRewards, Stages, checked_groups


def sample_steps(
    steps: Sequence[Sequence[Prompt]],
    stages: Stages,
    times: PhaseTimes,
    one_call: bool = False,
    max_rounds: int = 0,
    more_prompts: Callable[[int, int], list[Prompt]] | None = None,
) -> list[SampledStep]:
    """Sample and score the prompts of a round's optimizer steps, in one queue.

    With ``max_rounds`` (dynamic sampling, arXiv 2503.14476, section 3.2) a step takes only groups with a reward
    difference, and further prompts are drawn, at most so many times, until it has its number of them. They come in the
    order in which they were drawn, so a step's groups need not be those of its own prompts.

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
        # As many as will probably do, at most ten times those that are missing.
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
    """Sample and score: the groups in the order of the prompts, whose positions ascend.

    A group's scoring begins when it leaves its source, which then goes on with the others. What runs in this process
    does so between two engine steps. Both that and the waiting for the rest are charged to ``reward``.

    Args:
        one_call: score all groups together, when the last one is there.
        enough: groups with a reward difference after which no further prompt is needed: what is in flight is aborted,
            and the list ends with the last of them. Which groups these are depends on the order of the prompts alone,
            and not on what finishes first.
    """
    if one_call:
        return _first(_scored_together(prompts, stages, times), enough)
    settled: dict[int, Recorded] = stages.recall(prompts)  # by position, until they have advantages
    missing = [prompt for prompt in prompts if prompt.position not in settled]
    begun: dict[int, tuple[Group, PendingRewards]] = {}  # by position
    known: list[ScoredGroup] = []  # of the first prompts, as far as all before are known too
    signals: list[bool] = []  # of those

    def is_enough() -> bool:
        return sum(signals) >= enough

    def settle(position: int) -> None:
        group, pending = begun.pop(position)
        settled[position] = stages.record(group, pending.result())

    def settle_done() -> None:
        for position in [position for position, (_, pending) in begun.items() if pending.done()]:
            settle(position)

    def take_known(wait: bool) -> None:
        for prompt in prompts[len(known) :]:
            if is_enough():
                break
            if prompt.position not in settled:
                if not wait:
                    break
                settle(prompt.position)
                settle_done()
            known.append(stages.with_advantages(settled.pop(prompt.position)))
            signals.append(has_signal(known[-1]))

    try:
        # Closing aborts what is in flight: when there is enough, and when a reward fails.
        if enough < math.inf:
            take_known(wait=False)
        if missing and not is_enough():
            groups = checked_groups(stages.generate(missing), missing)
            with times.phase("generate"), contextlib.closing(groups):
                for group in groups:
                    started = time.perf_counter()
                    begun[group.position] = (group, stages.begin_score([group]))
                    settle_done()
                    if enough < math.inf:
                        take_known(wait=False)
                    times.move("generate", "reward", time.perf_counter() - started)
                    if is_enough():
                        break
        with times.phase("reward"):
            take_known(wait=True)
    finally:
        for _, pending in begun.values():  # of groups that turned out not to be needed
            pending.cancel()
    return known


def _scored_together(prompts: Sequence[Prompt], stages: Stages, times: PhaseTimes) -> list[ScoredGroup]:
    """The groups in the order of the prompts, from one call of the rewards: recorded are all of them, or none."""
    recorded = stages.recall(prompts)
    if len(recorded) == len(prompts):
        return [stages.with_advantages(recorded[prompt.position]) for prompt in prompts]
    with times.phase("generate"):
        groups = sorted(checked_groups(stages.generate(prompts), prompts), key=lambda group: group.position)
    with times.phase("reward"):
        if not groups:  # a rank may have none in an evaluation
            return []
        rewards = stages.begin_score(groups).result().split([len(group.rollouts) for group in groups])
        settled = [stages.record(group, of_group) for group, of_group in zip(groups, rewards, strict=True)]
        return [stages.with_advantages(one) for one in settled]


def _first(groups: Sequence[ScoredGroup], enough: float) -> list[ScoredGroup]:
    """Up to the ``enough``-th group with a signal."""
    before = itertools.accumulate((has_signal(group) for group in groups), initial=0)  # signals before each group
    return [group for group, signals in zip(groups, before, strict=False) if signals < enough]


def unscored(steps: Sequence[SampledStep]) -> str:
    """A line on the first completion for which every reward function abstained; empty if there is none."""
    for scored in (scored for step in steps for scored in step.sampled):
        nobody = scored.rewards.isnan().all(dim=1).nonzero()
        if len(nobody):
            row = {name: value for name, value in scored.group.example.items() if name != "prompt"}
            return (
                f"rewards: every reward function abstained for completion {int(nobody[0])} of the prompt "
                f"{reprlib.repr(scored.group.example.get('prompt'))} with {reprlib.repr(row)}: it isn't trained on "
                "(said once; `rewards/<name>/abstained` counts on)"
            )
    return ""
