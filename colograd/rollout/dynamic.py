"""Choose how the prompts of a round (all prompts sampled with one set of weights) are sampled: `round_of`.

`DynamicRound` is DAPO's dynamic sampling: a group with equal rewards is replaced by a further prompt's group.
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
    """Create the run's round object, which samples and scores prompts. A collective call: all ranks take part. An
    extension's hook ``tally`` is a function (trainer) -> `Tally`, or None to count nothing."""
    config, times = trainer.args, trainer.times
    one_call = config.reward_call == "all"
    chosen = next(filter(None, (offer(trainer) for offer in registry.hooks("round"))), None)
    if chosen is None and config.dynamic_sampling:
        chosen = DynamicRound(times, one_call, config.dynamic_sampling_max_rounds, more_prompts_of(trainer))
    chosen = chosen or PlainRound(times, one_call)
    chosen.tallies.extend(filter(None, (offer(trainer) for offer in registry.hooks("tally"))))
    return chosen


class DynamicRound(PlainRound):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) of the prompts of several optimizer steps.

    Only groups with a reward difference are trained. Further prompts are sampled until every step has enough groups.
    Steps take these groups in the order of sampling, so a step may train a group that was sampled for another step."""

    def __init__(self, times: PhaseTimes, one_call: bool, max_rounds: int, more_prompts: MorePrompts) -> None:
        super().__init__(times, one_call)
        self.max_rounds, self.more_prompts = max_rounds, more_prompts
        self.tallies.append(self.counts)

    def counts(self, steps: Sequence[SampledStep]) -> dict[str, float]:
        """Return two metrics of dynamic sampling: the number of sampled prompts, and the number of trained groups."""
        return {
            "dynamic_sampling/prompts": sum(len(step.sampled) for step in steps),
            "dynamic_sampling/groups": sum(len(step.kept) for step in steps),
        }

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """Sample and score the prompts of each optimizer step. Replace groups with equal rewards by further groups."""
        prompts = [prompt for step in steps for prompt in step]
        sampled = roll_out(prompts, stages, self.times, self.one_call)
        for _ in range(self.max_rounds):
            found = sum(map(has_signal, sampled))
            if found >= len(prompts):
                break
            # Draw as many prompts as the missing groups probably need: at most ten prompts per missing group.
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
    """Sample and score prompts until ``enough`` groups have a reward difference, and abort the later prompts' requests.
    Groups are counted in the prompts' order, not in the order of finishing. Return all groups up to the last counted
    group."""
    if one_call:
        groups = roll_out(prompts, stages, times, one_call)
        before = itertools.accumulate((has_signal(group) for group in groups), initial=0)
        return [group for group, signals in zip(groups, before, strict=False) if signals < enough]
    scoring = stages.scoring(stages, prompts)
    missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
    scored: list[ScoredGroup] = []  # Groups of the first prompts, in the order of the prompts.
    signals = 0  # Number of groups in `scored` with a reward difference.

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
            # Closing `samples` aborts the unfinished requests if there are enough groups or a reward function fails.
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
