"""Dynamic sampling: a round that samples further prompts in place of groups without a reward difference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...batch import Prompt, SampledStep
from ...data import extra_prompts
from ...policy.packing import has_signal
from ...reporting.metrics import PhaseTimes
from ...rollout.rounds import PlainRound, Steps
from ...rollout.stages import Stages

MorePrompts = Callable[[int, int], list[Prompt]]  # Draws extra prompts: (number drawn so far, number wanted).


def dynamic_round(trainer: Any) -> DynamicRound | None:
    args = trainer.args

    def more_prompts(drawn: int, count: int) -> list[Prompt]:
        return extra_prompts(trainer.train_prompts, args, trainer.state.global_step, drawn, count)

    if not args.dynamic_sampling:
        return None
    return DynamicRound(trainer.times, args.reward_call == "all", args.dynamic_sampling_max_rounds, more_prompts)


class DynamicRound(PlainRound):
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) for all optimizer steps of a round together.

    Steps take the groups that have a nonzero advantage, in the order of sampling. A group may be trained in a different
    step than the one that it was sampled for."""

    def __init__(self, times: PhaseTimes, one_call: bool, max_rounds: int, more_prompts: MorePrompts) -> None:
        super().__init__(times, one_call)
        self.max_rounds, self.more_prompts = max_rounds, more_prompts
        self.tallies.append(self.counts)

    def counts(self, steps: Sequence[SampledStep]) -> dict[str, float]:
        return {
            "dynamic_sampling/prompts": sum(len(step.sampled) for step in steps),
            "dynamic_sampling/groups": sum(len(step.kept) for step in steps),
        }

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        prompts = [prompt for step in steps for prompt in step]
        sampled = super().draw([prompts], stages)[0].sampled
        for _ in range(self.max_rounds):
            missing = len(prompts) - sum(map(has_signal, sampled))
            if missing <= 0:
                break
            # Number of prompts that probably give the missing groups, at most ten per missing group.
            count = math.ceil(missing / max((len(prompts) - missing) / len(sampled), 0.1))
            more = self.more_prompts(len(sampled) - len(prompts), count)
            until_enough = dataclasses.replace(stages, enough=missing)
            sampled += super().draw([more], until_enough)[0].sampled
        kept = filter(has_signal, sampled)
        return [
            SampledStep(kept=tuple(itertools.islice(kept, len(step))), sampled=tuple(sampled[index :: len(steps)]))
            for index, step in enumerate(steps)
        ]
