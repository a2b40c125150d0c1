"""One round with `carry_over`: the pool of groups in flight -> the scored groups of those that are done first.

A recorded round is taken from the rollout log, with what it left in flight. One that was killed before its end is
sampled again from its beginning, as where the others stop depends on all that was decoded beside them; recorded rewards
are not asked for again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from ..batch import Group, Prompt, SampledStep, ScoredGroup
from ..config import GRPOConfig
from ..reporting.metrics import PhaseTimes
from .in_flight import InFlight, RoundEnd
from .rounds import InScoring
from .stages import Stages, checked_groups


@dataclass(frozen=True, slots=True)
class CarriedRounds:
    """Samples and scores rounds that leave groups in flight.

    Args:
        ranks: that take a round's prompts together.
        one_call: score all groups of a round together.
    """

    in_flight: InFlight
    ranks: int
    times: PhaseTimes
    one_call: bool = False

    @classmethod
    def of(cls, in_flight: InFlight | None, config: GRPOConfig, times: PhaseTimes) -> Self | None:
        """Of a run; None: its rounds wait for all groups."""
        if in_flight is None:
            return None
        return cls(in_flight, config.layout.data_size, times, config.reward_call == "all")

    def counts(self) -> dict[str, float]:
        """Metrics of the round that ended, which add up over ranks."""
        return {"carry_over/groups": float(len(self.in_flight.groups))}

    def sample_steps(
        self,
        steps: Sequence[Sequence[Prompt]],
        stages: Stages,
        version: int,
        more_prompts: Callable[[int, int], list[Prompt]],
    ) -> list[SampledStep]:
        """The groups of a round's optimizer steps, those drawn first in the first one.

        Args:
            steps: the round's new prompts.
            version: the optimizer step of its weights.
            more_prompts: see `InFlight.pool`.
        """
        pool = self.in_flight.pool([prompt for step in steps for prompt in step], more_prompts)
        prompts = {prompt.position: prompt for prompt in pool}
        journal = stages.journal
        end = None if journal is None else journal.round_end(version, prompts.get, self.ranks)
        scored = None if end is None else self._recorded(pool, end, stages)
        if scored is not None and end is not None:
            self.in_flight.groups = end.carried
        else:
            scored = self._sampled(pool, stages)
            if journal is not None:
                done = tuple(each.group.position for each in scored)
                journal.note_round_end(RoundEnd(done, self.in_flight.groups), self.ranks)
        per_step = [scored[sum(map(len, steps[:index])) :][: len(step)] for index, step in enumerate(steps)]
        return [SampledStep(tuple(groups), tuple(groups)) for groups in per_step]

    def _recorded(self, pool: Sequence[Prompt], end: RoundEnd, stages: Stages) -> list[ScoredGroup] | None:
        """The groups of a round that is recorded whole; None: one of them couldn't be written."""
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
            if done <= scoring.rewarded.keys():  # else all are scored in the one call, also those that were before
                samples.clear()
            return self._score(samples, scoring, [prompt for prompt in pool if prompt.position in done])
        finally:
            scoring.cancel()

    def _score(self, samples: Sequence[Group], scoring: InScoring, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        """Score what isn't scored yet, in one call; the groups of ``prompts``, with advantages, in their order."""
        with self.times.phase("reward"):
            scoring.score_together(samples)
            return [scoring.scored(prompt.position) for prompt in prompts]
