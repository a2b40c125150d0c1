"""A round of sampling with `carry_over`: of all groups in flight, the groups that finish first are scored and trained.

A recorded round is read from the rollout log, together with the groups that the round left in flight. A round that was
killed before its end is sampled again from its beginning, because the place where an unfinished completion stops
depends on everything that was decoded in the round. Rewards that are already recorded are reused.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...batch import Group, Prompt, SampledStep, ScoredGroup
from ...data import prompt_at
from ...parallel.ranks import on_all_ranks
from ...reporting.console import LOGGER
from ...rollout.checks import checked_groups
from ...rollout.rounds import PlainRound, Steps, more_prompts_of
from ...rollout.stages import InScoring, Stages
from .in_flight import InFlight, RoundEnd, read_round_end, write_round_end

FILE = "rank-{rank:05d}.carried"  # Name of a rank's file in a round's folder.


def carried_round(trainer: Any) -> CarriedRound | None:
    return None if trainer.args.carry_over is None else CarriedRound(trainer)


class CarriedRound(PlainRound):
    """A round of sampling that leaves groups in flight. The first step trains the prompts that were drawn first."""

    longest_first = False  # The engine gets the oldest prompts first.

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.times, trainer.args.reward_call == "all")
        args = trainer.args
        age, sizes = args.carry_over_max_age * args.round_length, (args.num_generations, args.max_completion_length)
        self.in_flight = InFlight(args.groups_per_round, args.groups_in_flight, age, *sizes)
        self.trainer, self.more_prompts = trainer, more_prompts_of(trainer)
        self.ranks: int = trainer.args.layout.data_size  # Number of ranks that divide a round's prompts.
        self.tallies.append(self.counts)

    def counts(self, steps: Sequence[SampledStep]) -> dict[str, float]:
        """Return metrics of the round that ended: the number of groups in flight, and 0 as a summand of the ages."""
        return {"carry_over/groups": float(len(self.in_flight.groups)), "carry_over/ages": 0.0}

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        new = [prompt for step in steps for prompt in step]
        lacking = self.in_flight.size - len(self.in_flight.groups) - len(new)
        more = self.more_prompts(0, lacking) if lacking > 0 else []
        pool = [*(group.prompt for group in self.in_flight.groups), *new, *more]
        journal, version, end = stages.journal, self.trainer.state.global_step, None
        if journal is not None:
            name, prompts = FILE.format(rank=journal.rank), {prompt.position: prompt for prompt in pool}
            end = read_round_end(journal.round_folder(version) / name, prompts.get, self.ranks)
            if end is None:
                journal.lacks(
                    f"{journal.folder} doesn't say which groups a round of {self.ranks} rank(s) took at step {version} "
                    "(carry_over): replay the run on as many ranks as it had."
                )
        scored = None if end is None else self._recorded(pool, end, stages)
        if scored is not None and end is not None:
            self.in_flight.groups = end.carried
        else:
            scored = self._sampled(pool, stages)
            if journal is not None:
                written = RoundEnd(tuple(each.group.position for each in scored), self.in_flight.groups)
                journal.note_beside(lambda folder: write_round_end(folder / name, written, self.ranks))
        per_step = [scored[sum(map(len, steps[:index])) :][: len(step)] for index, step in enumerate(steps)]
        return [SampledStep(tuple(groups), tuple(groups)) for groups in per_step]

    def forget(self) -> None:
        self.in_flight.groups = ()

    def save(self, checkpoint: str) -> None:
        self.in_flight.save(checkpoint, self.trainer.args.layout.data_rank, self.ranks)

    def load(self, checkpoint: str | Path) -> None:
        trainer, layout = self.trainer, self.trainer.args.layout
        if trainer.args.ignore_data_skip:  # Prompts get new positions, so the saved groups don't fit.
            return
        with on_all_ranks("the groups in flight"):
            at = functools.partial(prompt_at, trainer.train_prompts, trainer.args)
            if layout.engine_place == 0 and (line := self.in_flight.load(checkpoint, layout.data_rank, self.ranks, at)):
                LOGGER.warning(line)

    def _recorded(self, pool: Sequence[Prompt], end: RoundEnd, stages: Stages) -> list[ScoredGroup] | None:
        """Return the scored groups of a recorded round, or None if the rollout log lacks a group."""
        done = [prompt for prompt in pool if prompt.position in end.done]
        scoring = stages.scoring(stages, done)
        assert stages.journal is not None
        samples = stages.journal.recall_samples([p for p in done if p.position not in scoring.rewarded])
        if len(scoring.rewarded) + len(samples) < self.in_flight.takes:
            return None
        return self._score(samples, scoring, done)

    def _sampled(self, pool: Sequence[Prompt], stages: Stages) -> list[ScoredGroup]:
        scoring, done, samples = stages.scoring(stages, pool), set[int](), list[Group]()
        groups = checked_groups(stages.generate(pool), pool, self.in_flight.takes)
        try:
            with self.times.phase("generate"), contextlib.closing(groups):
                for group in groups:
                    done.add(group.position)
                    if self.one_call:
                        samples.append(group)
                        continue
                    if group.position in scoring.rewarded:
                        continue
                    started = time.perf_counter()
                    scoring.take(group)
                    self.times.move("generate", "reward", time.perf_counter() - started)
            if done <= scoring.rewarded.keys():  # One call scores all groups, unless all have recorded rewards.
                samples.clear()
            return self._score(samples, scoring, [prompt for prompt in pool if prompt.position in done])
        finally:
            scoring.cancel()

    def _score(self, samples: Sequence[Group], scoring: InScoring, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """Score the groups ``samples`` in one call. Return the scored groups of ``prompts``, in that order."""
        with self.times.phase("reward"):
            if samples:
                scoring.score_together(samples)
            scoring.prompts = prompts
            return scoring.scored()
