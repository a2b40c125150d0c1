"""Sample and score the prompts of a round (all prompts sampled with one set of weights).

The scoring of a group begins when its last completion ends, while vLLM decodes other groups. With `reward_call: all`
the groups are scored together after sampling. `round_of` chooses the run's round object at start: `PlainRound`, or an
extension's class.
"""

from __future__ import annotations

import contextlib
import itertools
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..batch import Group, Prompt, SampledStep
from ..reporting.metrics import PhaseTimes
from ..runtime import registry
from .stages import Stages

Steps = Sequence[Sequence[Prompt]]  # One list of prompts per optimizer step.
Tally = Callable[[Sequence[SampledStep]], Mapping[str, float]]  # Returns metrics of the sampled steps.


class PlainRound:
    """Samples and scores the prompts of several optimizer steps, and returns the groups when all are complete.

    Extensions derive classes that sample otherwise. An extension's hook ``round`` is a function that takes the trainer
    and returns such an object, or None if the extension isn't in use."""

    longest_first = True  # Whether prompts with long expected completions go first, if vLLM must queue.

    def __init__(self, times: PhaseTimes, one_call: bool = False) -> None:
        self.times, self.one_call = times, one_call
        self.tallies: list[Tally] = []  # Functions that add metrics after each round of sampling.
        # Context manager around the sampling of a round. All ranks enter the context, but only the first rank of each
        # vLLM engine calls `draw` inside.
        self.around: Callable[[Steps], AbstractContextManager[Any]] = contextlib.nullcontext

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """Sample and score the prompts of all steps as one queue. Called on the first rank of each vLLM engine only.

        A group's scoring begins when the group is complete, while vLLM generates other groups. Sync reward functions in
        this process run between two engine steps. The phase ``reward`` has their time and the wait for pending rewards.
        With `reward_call: all` recorded groups are used only if the rollout log has all groups of ``steps``."""
        prompts = [prompt for step in steps for prompt in step]
        scoring = stages.scoring(stages, prompts)
        waiting = list[Group]()  # Groups that will be scored in one call.
        try:
            missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
            if not self.one_call:
                scoring.scored(wait=False)
            if missing and not scoring.has_enough:
                groups = scoring.sample(prompts if self.one_call else missing)
                # Closing `groups` aborts the unfinished requests if there are enough groups or a reward function fails.
                with self.times.phase("generate"), contextlib.closing(groups):
                    for group in groups:
                        if self.one_call:
                            waiting.append(group)
                            continue
                        started = time.perf_counter()
                        scoring.take(group)
                        scoring.scored(wait=False)
                        self.times.move("generate", "reward", time.perf_counter() - started)
                        if scoring.has_enough:
                            break
            with self.times.phase("reward"):
                if waiting:
                    scoring.score_together(sorted(waiting, key=lambda group: group.position))
                scored = iter(scoring.scored())
        finally:
            scoring.cancel()
        of_steps = [tuple(itertools.islice(scored, len(step))) for step in steps]
        return [SampledStep(groups, groups) for groups in of_steps]

    def forget(self) -> None:
        """Drop all state of earlier sampling, e.g. unfinished completions. Here: nothing."""

    def save(self, checkpoint: str) -> None:
        """Write state that the next sampling needs, e.g. unfinished completions, to a checkpoint. Here: nothing."""

    def load(self, checkpoint: str | Path) -> None:
        """Read the state that `save` wrote to a checkpoint folder. A collective call: all ranks take part."""


def round_of(trainer: Any) -> PlainRound:
    """Create the run's round object, which samples and scores prompts. A collective call: all ranks take part. A
    function at the hook ``tally`` takes the trainer and returns a `Tally`, or None to count nothing."""
    chosen = next(filter(None, (offer(trainer) for offer in registry.hooks("round"))), None)
    chosen = chosen or PlainRound(trainer.times, trainer.args.reward_call == "all")
    chosen.tallies.extend(filter(None, (offer(trainer) for offer in registry.hooks("tally"))))
    return chosen


def unscored(steps: Sequence[SampledStep]) -> str:
    """Return a warning about the first completion that no reward function scored (all NaN), or "" if there is none."""
    for scored in (scored for step in steps for scored in step.sampled):
        nobody = scored.rewards.isnan().all(dim=1).nonzero()
        if len(nobody) and scored.rewards.shape[1]:  # false if the run has no reward functions
            row = {name: value for name, value in scored.group.example.items() if name != "prompt"}
            return (
                f"rewards: every reward function abstained for completion {int(nobody[0])} of the prompt "
                f"{reprlib.repr(scored.group.example.get('prompt'))} with {reprlib.repr(row)}: it isn't trained on. "
                "This warning is printed once; the metrics `rewards/<name>/abstained` count all cases."
            )
    return ""
