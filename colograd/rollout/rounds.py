"""`PlainRound`: samples and scores the prompts of a round (all prompts sampled with one set of weights)."""

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

Steps = Sequence[Sequence[Prompt]]
Tally = Callable[[Sequence[SampledStep]], Mapping[str, float]]


class PlainRound:
    """Samples and scores the prompts of a round, i.e. of one or more optimizer steps.

    Extensions have subclasses that sample otherwise, such as dynamic sampling."""

    longest_first = True  # Whether prompts with long expected completions are sampled first.

    def __init__(self, times: PhaseTimes, one_call: bool = False) -> None:
        self.times, self.one_call = times, one_call
        self.tallies: list[Tally] = []
        # Makes a context that all ranks enter. `draw` runs inside, only on each engine's first rank.
        self.around: Callable[[Steps], AbstractContextManager[Any]] = contextlib.nullcontext

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """Sample and score all steps' prompts as one queue. Only the first rank of each engine calls this method."""
        prompts = [prompt for step in steps for prompt in step]
        scoring = stages.scoring(stages, prompts)
        waiting = list[Group]()
        try:
            missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
            if not self.one_call:
                scoring.scored(wait=False)
            if missing and not scoring.has_enough:
                groups = scoring.sample(prompts if self.one_call else missing)
                # Closing `groups` aborts the engine's unfinished requests.
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
        pass

    def save(self, checkpoint: str) -> None:
        """Write the state that later rounds need into the folder ``checkpoint``. This class has no state."""

    def load(self, checkpoint: str | Path) -> None:
        """Read the state that `save` wrote. All ranks call this method."""


def round_of(trainer: Any) -> PlainRound:
    """Create the object that samples all rounds of a run: an extension's, or a `PlainRound`. All ranks call this."""
    chosen = next(filter(None, (offer(trainer) for offer in registry.hooks("round"))), None)
    chosen = chosen or PlainRound(trainer.times, trainer.args.reward_call == "all")
    chosen.tallies.extend(filter(None, (offer(trainer) for offer in registry.hooks("tally"))))
    return chosen


def unscored(steps: Sequence[SampledStep]) -> str:
    for scored in (scored for step in steps for scored in step.sampled):
        nobody = scored.rewards.isnan().all(dim=1).nonzero()
        if len(nobody) and scored.rewards.shape[1]:
            row = {name: value for name, value in scored.group.example.items() if name != "prompt"}
            return (
                f"rewards: every reward function abstained for completion {int(nobody[0])} of the prompt "
                f"{reprlib.repr(scored.group.example.get('prompt'))} with {reprlib.repr(row)}: it isn't trained on "
                "(printed once; the metrics `rewards/<name>/abstained` count all cases)"
            )
    return ""
