"""One round with `carry_over`: from a pool of groups in flight, score the groups that are done first.

A recorded round is read from the rollout log, together with the groups that it left in flight. A round that was killed
before its end is sampled again from its beginning: where an unfinished completion stops depends on everything that was
decoded in the same round. Rewards that are already recorded are reused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from ...batch import Group, Prompt, SampledStep, ScoredGroup
from ...config import GRPOConfig
from ...reporting.metrics import PhaseTimes
from ...rollout.rounds import InScoring
from ...rollout.stages import Stages, checked_groups
from .in_flight import InFlight, RoundEnd, note_round_end, recorded_round_end


@dataclass(frozen=True, slots=True)
class CarriedRounds:
    """Samples and scores rounds that leave groups in flight.

    Args:
        ranks: number of ranks that share a round's prompts.
        one_call: score all groups of a round in one call.
    """

    in_flight: InFlight
    ranks: int
    times: PhaseTimes
    one_call: bool = False

    @classmethod
    def of(cls, in_flight: InFlight | None, config: GRPOConfig, times: PhaseTimes) -> Self | None:
        """Return the carried rounds of a run, or None if its rounds wait for all groups."""
        if in_flight is None:
            return None
        return cls(in_flight, config.layout.data_size, times, config.reward_call == "all")

    def counts(self) -> dict[str, float]:
        """Return metrics of the round that ended. They are summed over ranks."""
        return {"carry_over/groups": float(len(self.in_flight.groups))}

    def sample_steps(
        self,
        steps: Sequence[Sequence[Prompt]],
        stages: Stages,
        version: int,
        more_prompts: Callable[[int, int], list[Prompt]],
    ) -> list[SampledStep]:
        """Return the groups of each optimizer step of a round. The groups that were drawn first are in the first step.

        Args:
            steps: the round's new prompts, per optimizer step.
            version: the optimizer step of the weights that sample.
            more_prompts: see `InFlight.pool`.
        """
        pool = self.in_flight.pool([prompt for step in steps for prompt in step], more_prompts)
        prompts = {prompt.position: prompt for prompt in pool}
        journal = stages.journal
        end = None if journal is None else recorded_round_end(journal, version, prompts.get, self.ranks)
        scored = None if end is None else self._recorded(pool, end, stages)
        if scored is not None and end is not None:
            self.in_flight.groups = end.carried
        else:
            scored = self._sampled(pool, stages)
            if journal is not None:
                done = tuple(each.group.position for each in scored)
                note_round_end(journal, RoundEnd(done, self.in_flight.groups), self.ranks)
        per_step = [scored[sum(map(len, steps[:index])) :][: len(step)] for index, step in enumerate(steps)]
        return [SampledStep(tuple(groups), tuple(groups)) for groups in per_step]

    def _recorded(self, pool: Sequence[Prompt], end: RoundEnd, stages: Stages) -> list[ScoredGroup] | None:
        """Return the groups of a recorded round, or None if one of them wasn't written."""
        done = [prompt for prompt in pool if prompt.position in end.done]
        scoring = InScoring(stages, done)
        assert stages.journal is not None
        samples = stages.journal.recall_samples([p for p in done if p.position not in scoring.rewarded])  # `rescore`
        if len(scoring.rewarded) + len(samples) < self.in_flight.takes:
            return None
        return self._score(samples, scoring, done)

    def _sampled(self, pool: Sequence[Prompt], stages: Stages) -> list[ScoredGroup]:
        scoring, done, samples = InScoring(stages, pool), set[int](), list[Group]()
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
                    scoring.begin(group)
                    scoring.take_finished()
                    self.times.move("generate", "reward", time.perf_counter() - started)
            if done <= scoring.rewarded.keys():  # else one call scores all groups, including the rewarded ones
                samples.clear()
            return self._score(samples, scoring, [prompt for prompt in pool if prompt.position in done])
        finally:
            scoring.cancel()

    def _score(self, samples: Sequence[Group], scoring: InScoring, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """Score ``samples`` in one call. Return the groups of ``prompts``, in that order, with advantages."""
        with self.times.phase("reward"):
            scoring.score_together(samples)
            return [scoring.scored(prompt.position) for prompt in prompts]
