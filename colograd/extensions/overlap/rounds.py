"""`OverlappedRound`: finished groups of a step are trained before its last group is sampled.

A rank that has sampled trains its groups while other ranks still decode, and takes finished groups from these ranks.
`beside_decoding` trains between the steps of a rank's own engine.

No weight changes before the optimizer's step, so the groups are on-policy whenever they are trained. Gradients add up
unnormalised, and ranks exchange nothing meanwhile. When all have sampled, ranks continue, in smaller and smaller
micro-batches, until none of them trains. The remaining groups are balanced, packed and trained as without `overlap`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from ...batch import Group, PackedRow, Prompt, SampledStep, ScoredGroup, StepBatch
from ...engine.load import Load, after_each_step, load_after_each_step
from ...parallel import watchdog
from ...parallel.ranks import gather
from ...policy.packing import PackingRules, has_signal, plan_rows
from ...policy.second_models import fill
from ...reporting.metrics import Metrics, PhaseTimes
from ...rollout.rounds import PlainRound, Steps
from ...rollout.stages import InScoring, Stages
from ...rollout.statistics import RolloutStatistics
from ...rollout.store import RewardedGroup
from ...training.loss_pass import loss_pass
from ...training.step_batches import step_batch
from .beside_decoding import BesideDecoding
from .finished_groups import FinishedGroups, OwnGroups
from .first_rows import EarlyRows, first_rows
from .partition import Partition, record_partition, recorded_partition
from .rules import finished_groups, submits_later, why_no_overlap

EVERY = 0.01  # seconds between two polls for finished groups


def overlapped_round(trainer: Any) -> OverlappedRound | None:
    """Return the round of a run that trains groups early, or that repeats a record of such a run. A collective."""
    args = trainer.args
    if args.dynamic_sampling:
        return None
    round_ = OverlappedRound(trainer)
    if trainer.samples:  # otherwise a replay
        round_.finished = finished_groups(args, why_no_overlap(trainer), round_.accepts)
    recorded = args.keeps_journal and (not trainer.samples or gather(_has_recorded(trainer.journal))[0])
    if round_.finished is None and not recorded:
        return None
    trainer.learner.pack = round_.pack
    return round_


def _has_recorded(journal: Any) -> bool:
    return journal is not None and any(recorded_partition(journal, step + 1) is not None for step in journal.rounds())


class OverlappedRound(PlainRound):
    """A round whose first optimizer step is trained in part while ranks sample.

    A recorded step is trained in the micro-batches of its first training instead.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.times, trainer.args.reward_call == "all")
        self.trainer, self.learner = trainer, trainer.learner
        self.finished: OwnGroups | None = None  # None: nothing is trained while ranks sample
        self.early: EarlyRows | None = None  # rows of the next step, trained while ranks sampled
        self.recorded: Partition | None = None  # micro-batches of the next step's first training
        self._is_shared = False  # whether this round's groups may be trained while ranks sample
        self._is_first = False  # whether the round's first step isn't packed yet
        self._sampled: list[SampledStep] = []  # this round's, on the first rank of an engine
        self.around = self._train_meanwhile
        self.beside_decoding = BesideDecoding(
            self._rows_of, self.train_rows, self.learner.free_gradients, trainer.recorder.early_arrived,
            trainer.args.device,
        )  # fmt: skip

    def forget(self) -> None:
        """See `PlainRound.forget`."""
        self.early = None

    def accepts(self, scored: ScoredGroup) -> bool:
        """Return whether a group gets a gradient, and the present weights sampled it."""
        step = self.trainer.state.global_step
        return self._is_trained(scored) and all(rollout.policy_version == step for rollout in scored.group.rollouts)

    def _is_trained(self, scored: ScoredGroup) -> bool:
        return has_signal(scored) or not self.learner.rules.skip_without_signal

    # -- sampling

    @contextlib.contextmanager
    def _train_meanwhile(self, steps: Steps) -> Iterator[None]:
        """Wrap a round's sampling: train finished groups until no rank samples or trains any more."""
        self.early, self.recorded, self._is_first, self._sampled = None, self._recorded_partition(), True, []
        finished = self.finished if self.recorded is None else None
        self._is_shared = finished is not None
        if finished is None:
            yield
            return
        try:
            finished.begin(prompt.position for prompt in steps[0])
            self.learner.model.train()
            self.beside_decoding.begin()
            yield
        finally:
            finished.finish()
        for scored in self._sampled[0].kept if self._sampled else ():
            finished.add(scored)
        self.early = self._train_early(finished)

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        """See `PlainRound.draw`."""
        if self._is_shared:
            stages = dataclasses.replace(stages, scoring=functools.partial(_SharedScoring, self))
        self._sampled = super().draw(steps, stages)
        return self._sampled

    def share(self, recorded: RewardedGroup, stages: Stages) -> None:
        """Share a group that has its rewards: it may be trained from here on."""
        if self.finished is not None and self.finished.wants(recorded.group.position):
            advantages = stages.compute_advantages(recorded.group, recorded.rewards.clone())
            self.finished.add(ScoredGroup(recorded.group, recorded.rewards, advantages))

    @contextlib.contextmanager
    def between_steps(self, work: Callable[[], None]) -> Iterator[None]:
        """Call ``work`` after each step of the engine, serve other ranks there, and train in the tail."""
        engine, finished = self.trainer.engine, self.finished
        assert finished is not None

        def serve() -> None:
            work()
            finished.serve()

        def train(load: Load) -> None:
            with self.times.inside("generate"):
                self.beside_decoding.after_step(finished, load, self.learner.rules.max_tokens)

        with after_each_step(engine, serve):
            if submits_later(self.trainer.sampler.source, engine) or self.trainer.args.why_not_between_steps:
                yield
                return
            with load_after_each_step(engine, train):
                yield
            started = time.perf_counter()
            self.beside_decoding.wait()
            self.times.move("generate", "train", time.perf_counter() - started)

    def _recorded_partition(self) -> Partition | None:
        """Return the recorded partition of the step that is trained next, the same on all ranks. A collective."""
        trainer = self.trainer
        if not trainer.args.keeps_journal:
            return None
        reads = trainer.args.layout.is_main and trainer.journal is not None
        return gather(recorded_partition(trainer.journal, trainer.state.global_step + 1) if reads else None)[0]

    # -- training while ranks sample

    def _train_early(self, finished: OwnGroups) -> EarlyRows:
        """Train finished groups of the next step until no rank samples or trains any more. No collective."""
        self.learner.model.train()
        early = self.beside_decoding.end(self.trainer.state.global_step)
        if early.out_of_memory or not isinstance(finished, FinishedGroups):
            return early
        early = self._train_while_others_sample(finished, early)
        if early.out_of_memory:
            self.learner.free_gradients()
        return early

    def _train_while_others_sample(self, finished: FinishedGroups, early: EarlyRows) -> EarlyRows:
        """Train micro-batch by micro-batch. Return all rows trained early, with ``early``."""
        while not finished.is_over():
            groups = finished.take(self.learner.rules.max_tokens)
            if not groups:
                with self.times.phase("wait"):
                    watchdog.progress("waiting for ranks that sample")
                    time.sleep(EVERY * max(1.0, finished.layout.world_size / 8))  # one store answers all ranks
                continue
            early.groups += groups
            try:
                with finished.training():
                    early.rows += self.train_rows(self._rows_of(groups), early.metrics)
                continue
            except torch.OutOfMemoryError:
                pass
            # The exception is gone, and with it the activations. The other ranks learn of it when they have sampled.
            return EarlyRows(early.groups)
        return early

    def _rows_of(self, groups: Sequence[ScoredGroup]) -> Sequence[PackedRow]:
        rules = self.learner.rules
        return plan_rows(groups, rules.max_tokens, rules.mask_truncated, rules.device, rules.share_prompts)

    def train_rows(
        self, rows: Sequence[PackedRow], metrics: Metrics, unread: list[torch.Tensor] | None = None
    ) -> Sequence[PackedRow]:
        """Run forward and backward of finished groups' rows (see `loss_pass`).

        Returns:
            The rows with the second models' log-probabilities.
        """
        trainer, learner = self.trainer, self.learner
        autocast = trainer.compute_loss_context_manager
        if learner.second_models:
            with self.times.phase("ref_logprobs"), autocast():
                rows = fill(learner.second_models, rows, trainer.args.temperature)
        step = StepBatch(tuple(rows), 0, 0, {}, (), trainer.state.global_step)
        with trainer.recorder.trains_early(step.rows), self.times.phase("train"):
            loss_pass(step, learner.row_loss(), autocast, learner.sharding, metrics=metrics, unread=unread)
        return step.rows

    # -- the step

    def pack(
        self,
        step: SampledStep,
        statistics: RolloutStatistics,
        rules: PackingRules,
        reward_names: Sequence[str],
        times: PhaseTimes,
        tell: Callable[[RolloutStatistics], None],
    ) -> StepBatch:
        """Pack a step as `step_batch` does. The round's first step begins with its trained or recorded rows."""
        if not self._is_first:
            return step_batch(step, statistics, rules, reward_names, times, tell)
        early, self.early, self._is_first = self.early, None, False
        trainer = self.trainer
        with times.phase("pack"):
            first = first_rows([*filter(self._is_trained, step.kept)], early, self.recorded, rules)
        if early is not None and any(first.partition) and trainer.args.layout.is_main and trainer.journal:
            record_partition(trainer.journal, trainer.state.global_step + 1, first.partition)
        batch = step_batch(step, statistics, rules, reward_names, times, tell, first.rest)
        if not first.partition:
            return batch
        tokens = sum(row.num_tokens for row in first.rows)
        own = (tokens, len(first.rows), first.moved, tokens if first.trained else 0)
        sums = [float(sum(column)) for column in zip(*gather(own if batch.counted else (0,) * 4), strict=True)]
        names = ("train/packed_tokens", "train/micro_batches", "train/moved_groups", "train/early_tokens")
        more = {name: batch.metrics.get(name, 0.0) + number for name, number in zip(names, sums, strict=True)}
        return dataclasses.replace(
            batch,
            rows=first.rows + batch.rows,
            groups=(*first.groups, *batch.groups),
            metrics=batch.metrics | more,
            trained=len(first.rows) if first.trained else 0,
            trained_metrics=early.metrics if early is not None and first.trained else None,
        )


class _SharedScoring(InScoring):
    """The rewards of a round whose finished groups are shared while the engine samples."""

    def __init__(self, round_: OverlappedRound, stages: Stages, prompts: Sequence[Prompt]) -> None:
        super().__init__(stages, prompts)
        self._round = round_
        for recalled in self.rewarded.values():
            round_.share(recalled, stages)

    def sample(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        with self._round.between_steps(self.take):
            yield from super().sample(prompts)

    def take(self, group: Group | None = None, position: int | None = None) -> None:
        earlier = set(self.rewarded)
        super().take(group, position)
        for at in [at for at in self.rewarded if at not in earlier]:
            self._round.share(self.rewarded[at], self.stages)
