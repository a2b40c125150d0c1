"""Sample and score the prompts of a round (all prompts sampled with one set of weights).

A group is scored as soon as its last completion ends, while vLLM decodes other groups. With `reward_call: all` the
groups are scored together after sampling. `dynamic.round_of` chooses the run's round object at start: `PlainRound`,
`DynamicRound`, or an extension's class.
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

Steps = Sequence[Sequence[Prompt]]  # One list of prompts per optimizer step.
MorePrompts = Callable[[int, int], list[Prompt]]  # Draws extra prompts: (number drawn so far, number wanted).
Tally = Callable[[Sequence[SampledStep]], Mapping[str, float]]  # Counts metrics of this rank's sampled steps.


class PlainRound:
    """Samples and scores the prompts of several optimizer steps, waits for all completions, and trains all groups.

    Extensions derive classes that sample otherwise. An extension's hook ``round`` is a function that takes the trainer
    and returns such an object, or None if the extension isn't in use."""

    longest_first = True  # Whether vLLM gets the prompts with the longest expected completions first.

    def __init__(self, times: PhaseTimes, one_call: bool = False) -> None:
        self.times, self.one_call = times, one_call
        self.tallies: list[Tally] = []  # Functions that add metrics after each round of sampling.
        # Context manager around the sampling of a round. All ranks enter the context, but only the first rank of each
        # vLLM engine samples inside.
        self.around: Callable[[Steps], AbstractContextManager[Any]] = contextlib.nullcontext

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """Sample and score the prompts of all steps as one queue. Called on the first rank of each vLLM engine only."""
        sampled = roll_out([prompt for step in steps for prompt in step], stages, self.times, self.one_call)
        by_position = {scored.group.position: scored for scored in sampled}
        of_steps = [tuple(by_position[prompt.position] for prompt in step) for step in steps]
        return [SampledStep(groups, groups) for groups in of_steps]

    def forget(self) -> None:
        """Drop all state that was carried over from earlier sampling. Here: nothing."""

    def save(self, checkpoint: str) -> None:
        """Write state that the next sampling needs, e.g. unfinished completions, to a checkpoint. Here: nothing."""

    def load(self, checkpoint: str | Path) -> None:
        """Read the state that `save` wrote to a checkpoint folder. A collective call: all ranks take part."""


def more_prompts_of(trainer: Any) -> MorePrompts:
    """Return a function that draws extra prompts from the training dataset: (number drawn so far, number wanted)."""
    return lambda drawn, count: extra_prompts(
        trainer.train_prompts, trainer.args, trainer.state.global_step, drawn, count
    )


def roll_out(prompts: Sequence[Prompt], stages: Stages, times: PhaseTimes, one_call: bool = False) -> list[ScoredGroup]:
    """Sample and score one group per prompt, and return the groups in the order of the prompts.

    A group's scoring begins when the group is complete, while vLLM generates other groups. Reward functions in this
    process run between two engine steps. The phase ``reward`` has their time and the wait for pending rewards.

    Args:
        one_call: score all groups in one call, after the last group is complete. The rollout log then has all or none.
    """
    scoring = stages.scoring(stages, prompts)
    waiting = list[Group]()  # groups that will be scored in one call
    try:
        missing = [prompt for prompt in prompts if prompt.position not in scoring.rewarded]
        if missing:
            groups = scoring.sample(prompts if one_call else missing)
            # Closing `groups` aborts the unfinished requests if a reward function fails.
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
    """Return a warning about the first completion that no reward function scored (all NaN), or "" if there is none."""
    for scored in (scored for step in steps for scored in step.sampled):
        nobody = scored.rewards.isnan().all(dim=1).nonzero()
        if len(nobody) and scored.rewards.shape[1]:  # false if the run has no reward functions
            row = {name: value for name, value in scored.group.example.items() if name != "prompt"}
            return (
                f"rewards: every reward function abstained for completion {int(nobody[0])} of the prompt "
                f"{reprlib.repr(scored.group.example.get('prompt'))} with {reprlib.repr(row)}: it isn't trained on "
                "(said once; `rewards/<name>/abstained` counts on)"
            )
    return ""
