"""Rounds: prompts -> scored groups. A group is scored as soon as it is whole, while the engine decodes others.

A run has one round object, chosen at start by `dynamic.round_of`: `PlainRound`, `DynamicRound`, or an extension's.
"""

from __future__ import annotations

import contextlib
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..batch import Group, Prompt, SampledStep, ScoredGroup
from ..data import extra_prompts
from ..reporting.metrics import PhaseTimes
from .stages import Stages

Steps = Sequence[Sequence[Prompt]]  # a round's prompts, a list per optimizer step
MorePrompts = Callable[[int, int], list[Prompt]]  # (number drawn so far, number wanted) -> further prompts
Tally = Callable[[Sequence[SampledStep]], Mapping[str, float]]  # a round's groups -> metrics, summed over ranks


class PlainRound:
    """A round that ends with its last completion and trains all groups. Extensions derive others.

    An extension offers its round at the seam ``round``: a function (trainer) -> round, or None if it isn't in use.
    """

    longest_first = True  # whether the engine gets the prompts with the longest completions first

    def __init__(self, times: PhaseTimes, one_call: bool = False) -> None:
        self.times, self.one_call = times, one_call
        self.tallies: list[Tally] = []  # add metrics after each round
        # A context around a round's sampling, entered on all ranks; the first rank of an engine draws inside.
        self.around: Callable[[Steps], AbstractContextManager[Any]] = contextlib.nullcontext

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """Sample and score a round on the first rank of an engine, in one queue."""
        sampled = roll_out([prompt for step in steps for prompt in step], stages, self.times, self.one_call)
        by_position = {scored.group.position: scored for scored in sampled}
        of_steps = [tuple(by_position[prompt.position] for prompt in step) for step in steps]
        return [SampledStep(groups, groups) for groups in of_steps]

    def forget(self) -> None:
        """Begin anew."""

    def save(self, checkpoint: str) -> None:
        """Write the state that the next round continues into a checkpoint, on the first rank of an engine."""

    def load(self, checkpoint: str | Path) -> None:
        """Read what `save` wrote. A collective."""


def more_prompts_of(trainer: Any) -> MorePrompts:
    """Return a function that draws further prompts in the present round."""
    return lambda drawn, count: extra_prompts(
        trainer.train_prompts, trainer.args, trainer.state.global_step, drawn, count
    )


def roll_out(prompts: Sequence[Prompt], stages: Stages, times: PhaseTimes, one_call: bool = False) -> list[ScoredGroup]:
    """Sample and score groups. Return them in the order of the prompts, which have ascending positions.

    Scoring a group begins when its source yields it, while the source continues with the others. Reward functions in
    this process run between two engine steps. Their time, and the wait for the others, counts as ``reward``.

    Args:
        one_call: score all groups in one call, after the last one. The journal then has all groups, or none.
    """
    scoring = stages.scoring(stages, prompts)
    waiting = list[Group]()  # groups to score in one call
    try:
        missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
        if missing:
            groups = scoring.sample(prompts if one_call else missing)
            # Closing aborts the requests in flight when a reward function fails.
            with times.phase("generate"), contextlib.closing(groups):
                for group in groups:
                    if one_call:
                        waiting.append(group)
                        continue
                    started = time.perf_counter()
                    scoring.take(group)
                    times.move("generate", "reward", time.perf_counter() - started)
        with times.phase("reward"):
            if waiting:
                scoring.score_together(sorted(waiting, key=lambda group: group.position))
            return [scoring.scored(prompt.position) for prompt in prompts]
    finally:
        scoring.cancel()


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
