"""A round of sampling with `carry_over`. When the round has enough finished groups, all other completions stop.

The next round continues them. Every token keeps the log-probability that it was sampled with. A round that was killed
is sampled again from its beginning, because the place where a completion stops depends on everything that was decoded
in the round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ...batch import FinishReason, Group, Prompt, SampledStep, ScoredGroup
from ...config import GRPOConfig
from ...data import extra_prompts, prompt_at
from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling, request_seed
from ...parallel.ranks import on_all_ranks
from ...policy.loading import Policy
from ...reporting.console import LOGGER
from ...rollout.checks import checked_groups
from ...rollout.features import SourceFeature, TrainerArguments
from ...rollout.rounds import PlainRound, Steps
from ...rollout.stages import InScoring, Stages
from .in_flight import InFlight, RoundEnd, extended, is_whole, of_round, read_round_end, write_round_end

FILE = "rank-{rank:05d}.carried"


class CarryOverFeature(SourceFeature):
    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        if config.carry_over is None:
            return None
        others = {**arguments.sources, "your own `generate`": "generate" in arguments.replaced}
        others["a column of images"] = arguments.has_images
        if name := next((name for name, value in others.items() if value), None):
            raise ValueError(
                f"carry_over is {config.carry_over}, but can't be combined with {name}. A completion can pause "
                f"only if the engine writes all of it and the prompt has only text: remove carry_over, or {name}."
            )
        return cls()

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> CarryOver:
        return CarryOver(engine, trainer.round.in_flight)


class CarryOver:
    def __init__(self, engine: Engine, in_flight: InFlight) -> None:
        self.engine, self.in_flight = engine, in_flight

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Yield finished groups. In training stop after `InFlight.takes` groups, and leave all others in flight."""
        if purpose != "train":
            yield from self.engine.generate(prompts, sampling, version=version, seed=seed, purpose=purpose)
            return
        self.engine.require(version)
        in_flight = self.in_flight
        groups = {group.position: group for group in in_flight.begin(prompts, version)}  # Groups not yielded yet.
        whole = [position for position, group in groups.items() if is_whole(group)]
        due, lacks = in_flight.due([*groups.values()], version), in_flight.takes
        requests = self._submit(groups, sampling, seed, purpose)

        def extend(ended: Iterable[tuple[str, Sequence[Sampled]]]) -> None:
            for request, (part,) in ended:
                position, index = requests.pop(request)
                rollouts = [*groups[position].rollouts]
                rollouts[index] = extended(rollouts[index], part, version)
                groups[position] = dataclasses.replace(groups[position], rollouts=tuple(rollouts))
                if is_whole(groups[position]):
                    whole.append(position)

        try:
            while lacks:
                for position in [*whole]:
                    if position in due or lacks > len(due):  # Keeps places for groups that must end in this round.
                        due.discard(position)
                        whole.remove(position)
                        lacks -= 1
                        yield of_round(groups.pop(position), version)
                if lacks:
                    extend(self.engine.advance())
            extend(self.engine.stop(requests))
            in_flight.groups = tuple(groups.values())
        finally:
            self.engine.abort(requests)

    def _submit(
        self, groups: Mapping[int, Group], sampling: Sampling, seed: int, purpose: str
    ) -> dict[str, tuple[int, int]]:
        """Submit unfinished completions. Return a dict: request's name -> (group's position, completion's index)."""
        requests = {}
        # A resumed run may have more groups than `size`, if `carry_over` or the number of ranks has changed.
        for position, group in itertools.islice(groups.items(), self.in_flight.size):
            for index, each in enumerate(group.rollouts):
                if each.finish_reason is not FinishReason.ABORT:
                    continue
                own_seed = request_seed(seed, position, purpose) + index  # The seed as in one request for the group.
                ids = each.completion_ids
                if ids:  # A continued completion needs new random numbers, independent of its earlier tokens.
                    own_seed = request_seed(seed, position, f"{purpose}/{index}/{len(ids)}")
                request = self.engine.submit(each.input.followed_by(ids), sampling, own_seed, n=1, spent=len(ids))
                requests[request] = position, index
        return requests


def carried_round(trainer: Any) -> CarriedRound | None:
    return None if trainer.args.carry_over is None else CarriedRound(trainer)


class CarriedRound(PlainRound):
    longest_first = False  # The engine gets the oldest prompts first instead of the longest.

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.times, trainer.args.reward_call == "all")
        args = trainer.args
        age, sizes = args.carry_over_max_age * args.round_length, (args.num_generations, args.max_completion_length)
        self.in_flight = InFlight(args.groups_per_round, args.groups_in_flight, age, *sizes)
        self.trainer = trainer
        self.ranks: int = trainer.args.layout.data_size  # Number of ranks among which prompts are divided.
        self.tallies.append(self.counts)

    def counts(self, steps: Sequence[SampledStep]) -> dict[str, float]:
        # `Versions.statistics` adds the ages of old tokens to this 0.
        return {"carry_over/groups": float(len(self.in_flight.groups)), "carry_over/ages": 0.0}

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        new = [prompt for step in steps for prompt in step]
        lacking = self.in_flight.size - len(self.in_flight.groups) - len(new)
        trainer, version = self.trainer, self.trainer.state.global_step
        more = extra_prompts(trainer.train_prompts, trainer.args, version, 0, lacking) if lacking > 0 else []
        begun = [Prompt(group.example, group.rollouts[0].input, group.position) for group in self.in_flight.groups]
        pool = [*begun, *new, *more]
        journal, end = stages.journal, None
        if journal is not None:
            name, prompts = FILE.format(rank=journal.rank), {prompt.position: prompt for prompt in pool}
            end = read_round_end(journal.round_folder(version) / name, prompts.get, self.ranks)
            if end is None:
                journal.lacks(
                    f"{journal.folder} doesn't say which groups a round of {self.ranks} rank(s) used at step {version} "
                    "(carry_over): replay the run on as many ranks as it had."
                )
        scored = None if end is None else self._recorded(pool, end, stages)
        if scored is None:
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
        if trainer.args.ignore_data_skip:  # Prompts get new positions, so saved groups don't fit.
            return
        with on_all_ranks("the groups in flight"):
            at = functools.partial(prompt_at, trainer.train_prompts, trainer.args)
            if layout.engine_place == 0 and (line := self.in_flight.load(checkpoint, layout.data_rank, self.ranks, at)):
                LOGGER.warning(line)

    def _recorded(self, pool: Sequence[Prompt], end: RoundEnd, stages: Stages) -> list[ScoredGroup] | None:
        """Restore a round from the rollout log. Return None if the log lacks a group of the round."""
        done = [prompt for prompt in pool if prompt.position in end.done]
        scoring = stages.scoring(stages, done)
        assert stages.journal is not None
        samples = stages.journal.recall_samples([p for p in done if p.position not in scoring.rewarded])
        if len(scoring.rewarded) + len(samples) < self.in_flight.takes:
            return None
        self.in_flight.groups = end.carried
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
            if done <= scoring.rewarded.keys():  # All rewards are recorded: score nothing.
                samples.clear()
            return self._score(samples, scoring, [prompt for prompt in pool if prompt.position in done])
        finally:
            scoring.cancel()

    def _score(self, samples: Sequence[Group], scoring: InScoring, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
        with self.times.phase("reward"):
            if samples:
                scoring.score_together(samples)
            scoring.prompts = prompts
            return scoring.scored()
