"""The choice of a run's round, and the round of dynamic sampling.

There groups without a reward difference are replaced by groups of further prompts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

from ..batch import Prompt, SampledStep, ScoredGroup
from ..policy.packing import has_signal
from ..reporting.metrics import PhaseTimes
from ..runtime import registry
from .rounds import MorePrompts, PlainRound, Steps, more_prompts_of, roll_out
from .stages import Stages


def round_of(trainer: Any) -> PlainRound:
    """Choose the round object of a run. A collective. The seam ``tally`` has functions (trainer) -> `Tally`, or None if
    there is nothing to count."""
    config, times = trainer.args, trainer.times
    one_call = config.reward_call == "all"
    chosen = next(filter(None, (offer(trainer) for offer in registry.hooks("round"))), None)
    if chosen is None and config.dynamic_sampling:
        chosen = DynamicRound(times, one_call, config.dynamic_sampling_max_rounds, more_prompts_of(trainer))
    chosen = chosen or PlainRound(times, one_call)
    chosen.tallies.extend(filter(None, (offer(trainer) for offer in registry.hooks("tally"))))
    return chosen


class DynamicRound(PlainRound):
    """A round of dynamic sampling (arXiv 2503.14476, section 3.2).

    It keeps only groups with a reward difference and draws further prompts until all steps are full. Steps take kept
    groups in the order of drawing, so a step may train groups of another step's prompts.
    """

    def __init__(self, times: PhaseTimes, one_call: bool, max_rounds: int, more_prompts: MorePrompts) -> None:
        super().__init__(times, one_call)
        self.max_rounds, self.more_prompts = max_rounds, more_prompts
        self.tallies.append(self.counts)

    def counts(self, steps: Sequence[SampledStep]) -> dict[str, float]:
        """Count the prompts drawn and the groups that are trained."""
        return {
            "dynamic_sampling/prompts": sum(len(step.sampled) for step in steps),
            "dynamic_sampling/groups": sum(len(step.kept) for step in steps),
        }

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """See `PlainRound.draw`."""
        prompts = [prompt for step in steps for prompt in step]
        sampled = roll_out(prompts, stages, self.times, self.one_call)
        for _ in range(self.max_rounds):
            found = sum(map(has_signal, sampled))
            if found >= len(prompts):
                break
            # The number of prompts that is probably enough, at most ten times the number of missing groups.
            count = math.ceil((len(prompts) - found) / max(found / len(sampled), 0.1))
            more = self.more_prompts(len(sampled) - len(prompts), count)
            sampled += roll_out_until(len(prompts) - found, more, stages, self.times, self.one_call)
        kept = filter(has_signal, sampled)
        return [
            SampledStep(kept=tuple(itertools.islice(kept, len(step))), sampled=tuple(sampled[index :: len(steps)]))
            for index, step in enumerate(steps)
        ]


def roll_out_until(
    enough: int, prompts: Sequence[Prompt], stages: Stages, times: PhaseTimes, one_call: bool
) -> list[ScoredGroup]:
    """Sample and score as `roll_out`. Stop after ``enough`` groups with a reward difference, and abort the rest. They
    are counted in the order of the prompts, not in the order of finishing."""
    if one_call:
        groups = roll_out(prompts, stages, times, one_call)
        before = itertools.accumulate((has_signal(group) for group in groups), initial=0)  # signals before each group
        return [group for group, signals in zip(groups, before, strict=False) if signals < enough]
    scoring = stages.scoring(stages, prompts)
    missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
    scored: list[ScoredGroup] = []  # the first prompts' groups, without a gap
    signals = 0  # groups of `scored` with a reward difference

    def extend_scored(wait: bool) -> None:
        nonlocal signals
        for prompt in prompts[len(scored) :]:
            if signals >= enough or (prompt.position not in scoring.rewarded and not wait):
                break
            scored.append(scoring.scored(prompt.position))
            signals += has_signal(scored[-1])

    try:
        extend_scored(wait=False)
        if missing and signals < enough:
            samples = scoring.sample(missing)
            # Closing aborts the requests in flight: when there are enough groups, and when a reward function fails.
            with times.phase("generate"), contextlib.closing(samples):
                for group in samples:
                    started = time.perf_counter()
                    scoring.take(group)
                    extend_scored(wait=False)
                    times.move("generate", "reward", time.perf_counter() - started)
                    if signals >= enough:
                        break
        with times.phase("reward"):
            extend_scored(wait=True)
    finally:
        scoring.cancel()
    return scored
