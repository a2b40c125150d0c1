"""`OverlappedRound`: a step's finished groups are trained before the step's last group is sampled.

No weight changes before the optimizer's step, so groups are on-policy whenever they are trained. The rows that are
trained early are the step's first rows. The round's folder records which groups these rows hold. With this record a
resumed or replayed step can train the same rows, if the run has the same number of ranks as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...batch import Group, PackedRow, Prompt, SampledStep, ScoredGroup, StepBatch
from ...config import GRPOConfig
from ...engine.protocol import after_each_step
from ...losses.token_losses import LOSSES
from ...parallel import watchdog
from ...parallel.balance import exchange
from ...parallel.ranks import gather, rank
from ...policy.packing import PackingRules, has_signal, plan_rows
from ...policy.second_models import fill
from ...reporting.metrics import Metrics, PhaseTimes
from ...rollout.record_file import add_step, steps_in
from ...rollout.rounds import PlainRound, Steps
from ...rollout.stages import InScoring, Stages
from ...rollout.statistics import RolloutStatistics
from ...sharding import strategy_of
from ...training.learner import loss_pass, step_batch
from .finished_groups import FinishedGroups

EVERY = 0.01  # Seconds between two polls for finished groups, with at most 8 ranks. More ranks poll less often.
FILE = "partition.jsonl"
LARGEST = 2**26  # Maximum characters that are read from a round's `FILE`.

# Per rank: batches of groups that the rank packed together. A batch is a tuple of groups' positions.
Partition = tuple[tuple[tuple[int, ...], ...], ...]


def read_partition(folder: Path, step: int) -> Partition | None:
    for noted, entry in steps_in(folder / FILE, LARGEST):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if noted == step:
                return tuple(tuple(tuple(map(int, batch)) for batch in batches) for batches in entry["ranks"])
    return None


@dataclass
class EarlyRows:
    """This rank's first rows of the next optimizer step: trained during sampling, or packed from a record."""

    groups: list[ScoredGroup] = field(default_factory=list)
    batches: list[tuple[int, ...]] = field(default_factory=list)  # Per batch: positions of groups packed together.
    rows: list[PackedRow] = field(default_factory=list)  # Rows in the order of training.
    metrics: Metrics = field(default_factory=Metrics)
    trained: bool = False  # Whether the rows' gradients are already computed.

    def add(self, groups: Sequence[ScoredGroup], rules: PackingRules) -> Sequence[PackedRow]:
        """Add groups, and return their packed rows. The caller must add these rows, or changed copies, to `rows`."""
        self.groups += groups
        self.batches.append(tuple(scored.group.position for scored in groups))
        return plan_rows(groups, rules.max_tokens, rules.mask_truncated, rules.device, rules.share_prompts)


class FirstRows(NamedTuple):
    rest: list[ScoredGroup]
    early: EarlyRows = EarlyRows()
    moved: int = 0  # Number of groups in this rank's first rows that another engine sampled.
    partition: Partition = ()  # Positions of the groups in all ranks' first rows.


def first_rows(
    groups: Sequence[ScoredGroup], early: EarlyRows | None, recorded: Partition | None, rules: PackingRules
) -> FirstRows:
    """Divide a step's groups into this rank's first rows and groups still to pack. All ranks call it together.

    Args:
        groups: groups to train that this rank sampled.
        early: rows that this rank has already trained.
        recorded: positions of the groups that all ranks' first rows had when an earlier process trained this step.
    """
    if rules.ranks_per_row > 1 or rules.equal_counts:
        recorded = None
    if early is None and recorded is None:
        return FirstRows([*groups])
    positions = [scored.group.position for scored in groups]
    held, trained = zip(*gather((positions, early.batches if early else ())), strict=True)
    partition: Partition = trained if recorded is None else recorded
    places = {position: (owner, index) for owner, of in enumerate(held) for index, position in enumerate(of)}
    of_ranks = [[*itertools.chain(*batches)] for batches in partition]
    taken = [*itertools.chain(*of_ranks)]
    if recorded is not None:
        if len(recorded) != len(held) or len({*taken}) < len(taken) or not {*taken} <= places.keys():
            return FirstRows([*groups])  # The record doesn't fit. Packing anew changes only rounding.
        received = exchange(groups, [[places[position] for position in of_rank] for of_rank in of_ranks])
        by_position, early = {scored.group.position: scored for scored in received}, EarlyRows()
        for batch in recorded[rank()]:
            early.rows += early.add([by_position[position] for position in batch], rules)
    assert early is not None
    engine = rank() // rules.ranks_per_engine
    moved = sum(places[scored.group.position][0] // rules.ranks_per_engine != engine for scored in early.groups)
    return FirstRows([scored for scored in groups if scored.group.position not in taken], early, moved, partition)


def why_not(trainer: Any) -> str:
    """Return why no group can be trained before all groups are sampled, or ""."""
    config: GRPOConfig = trainer.args
    objective, replaced = trainer.learner.objective, trainer.replaced
    reasons: list[tuple[Any, str]] = [
        (config.sequence_parallel_size > 1, "with sequence_parallel_size ranks exchange in each forward"),
        (strategy_of(config).meets_in_backward, f"with sharding: {config.sharding} ranks exchange in each backward"),
        (config.dynamic_sampling, "dynamic_sampling chooses the step's groups among all that were sampled"),
        (trainer.estimator.step_scores is not None, "advantages are divided by a deviation over the step"),
        (objective.top_entropy_quantile < 1, "top_entropy_quantile is of all the step's tokens"),
        (objective.entropy_bonus, "the entropy's bonus is a mean over the step"),
        *((term.waits, term.waits) for term in objective.terms),
        (type(objective.loss) not in LOSSES.values(), "a loss of your own may read the step's constants"),
        ("compute_loss" in replaced, "a compute_loss of your own may read the step's constants"),
        ("compute_advantages" in replaced, "a compute_advantages of your own is called in the prompts' order"),
        (config.offload_reference and not config.on_cpu, "offload_reference has no room beside gradients"),
        (config.full_determinism, "full_determinism forbids sums whose order depends on clocks"),
        (config.world_size == 1, "there is no other rank"),
    ]
    return next((reason for applies, reason in reasons if applies), "")


def note(trainer: Any) -> str:
    config: GRPOConfig = trainer.args
    if config.overlap == "off":
        return ""
    if why := why_not(trainer):
        return f"overlap: nothing is trained before all ranks have sampled, as {why}"
    others = ", and finished ones of other ranks," if config.balance_ranks else ""
    later = "; only for the first optimizer step of each round" if config.round_length > 1 else ""
    return f"overlap: a rank that has sampled trains its groups{others} while others sample{later}"


def overlapped_round(trainer: Any) -> OverlappedRound | None:
    """Return an `OverlappedRound` if this run trains groups early or may replay early training. All ranks must call."""
    args, journal = trainer.args, trainer.journal
    if args.dynamic_sampling:
        return None
    round_ = OverlappedRound(trainer)
    if trainer.samples and args.overlap != "off" and not why_not(trainer):
        between_engines = args.balance_ranks and args.layout.data_size > 1
        round_.finished = FinishedGroups(args.layout, between_engines, round_.accepts)
    recorded = args.keeps_journal
    if recorded and trainer.samples:
        steps = () if journal is None else journal.rounds()
        recorded = gather(any(read_partition(journal.round_folder(s), s + 1) is not None for s in steps))[0]
    if round_.finished is None and not recorded:
        return None
    trainer.learner.pack = round_.pack
    return round_


class OverlappedRound(PlainRound):
    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.times, trainer.args.reward_call == "all")
        self.trainer, self.learner = trainer, trainer.learner
        self.finished: FinishedGroups | None = None  # None: this run doesn't train during sampling.
        self.early: EarlyRows | None = None  # Rows that this rank trained during sampling.
        self.recorded: Partition | None = None
        self._shared: FinishedGroups | None = None  # `finished`, or None in a round with recorded first rows.
        self._is_first = False  # Whether the round's first step isn't packed yet.
        self._sampled: list[SampledStep] = []  # Sampled steps of this round, on the first rank of an engine.
        self.around = self._train_meanwhile

    def forget(self) -> None:
        self.early = None

    def accepts(self, scored: ScoredGroup) -> bool:
        step = self.trainer.state.global_step
        return self._is_trained(scored) and all(rollout.policy_version == step for rollout in scored.group.rollouts)

    def _is_trained(self, scored: ScoredGroup) -> bool:
        return has_signal(scored) or not self.learner.rules.skip_without_signal

    @contextlib.contextmanager
    def _train_meanwhile(self, steps: Steps) -> Iterator[None]:
        self.early, self.recorded, self._is_first, self._sampled = None, None, True, []
        args, journal, step = self.trainer.args, self.trainer.journal, self.trainer.state.global_step
        if args.keeps_journal:
            reads = args.layout.is_main and journal is not None
            self.recorded = gather(read_partition(journal.round_folder(step), step + 1) if reads else None)[0]
        self._shared = finished = self.finished if self.recorded is None else None
        if finished is None:
            yield
            return
        try:
            finished.begin(prompt.position for prompt in steps[0])
            yield
        finally:
            finished.finish()
        for scored in self._sampled[0].kept if self._sampled else ():
            finished.add(scored)
        self.early = self._train_early(finished)

    def draw(self, steps: Steps, stages: Stages) -> list[SampledStep]:
        if (shared := self._shared) is not None:
            stages = dataclasses.replace(stages, scoring=functools.partial(_SharedScoring, self.trainer.engine, shared))
        self._sampled = super().draw(steps, stages)
        return self._sampled

    def _train_early(self, finished: FinishedGroups) -> EarlyRows:
        rules, early = self.learner.rules, EarlyRows(trained=True)
        self.learner.model.train()
        while not finished.is_over():
            groups = finished.take(rules.max_tokens)
            if not groups:
                with self.times.phase("wait"):
                    watchdog.progress("waiting for ranks that sample")
                    time.sleep(EVERY * max(1.0, finished.layout.world_size / 8))  # All ranks poll one store.
                continue
            with contextlib.suppress(torch.OutOfMemoryError), finished.training():
                early.rows += self.train_rows(early.add(groups, rules), early.metrics)
                continue
            # Out of memory. In an `except` block the exception would still hold activations.
            self.learner.free_gradients()
            return EarlyRows()
        return early

    def train_rows(self, rows: Sequence[PackedRow], metrics: Metrics) -> Sequence[PackedRow]:
        """Run forward and backward of rows. Return the rows with the values of reference and teacher models, if any."""
        trainer, learner = self.trainer, self.learner
        autocast = trainer.compute_loss_context_manager
        if learner.second_models:
            with self.times.phase("ref_logprobs"), autocast():
                rows = fill(learner.second_models, rows, trainer.args.temperature)
        step = StepBatch(tuple(rows), 0, 0, {}, (), trainer.state.global_step)
        with trainer.recorder.trains_early(step.rows), self.times.phase("train"):
            loss_pass(step, learner.row_loss(), autocast, learner.sharding, metrics=metrics)
        return step.rows

    def pack(
        self, step: SampledStep, statistics: RolloutStatistics, rules: PackingRules, reward_names: Sequence[str],
        times: PhaseTimes, tell: Callable[[RolloutStatistics], None],
    ) -> StepBatch:  # fmt: skip
        if not self._is_first:
            return step_batch(step, statistics, rules, reward_names, times, tell)
        early, self.early, self._is_first = self.early, None, False
        trainer, number = self.trainer, self.trainer.state.global_step + 1
        with times.phase("pack"):
            first = first_rows([*filter(self._is_trained, step.kept)], early, self.recorded, rules)
        if early is not None and any(first.partition) and trainer.args.layout.is_main and trainer.journal:
            entry = {"ranks": first.partition}
            trainer.journal.note_beside(lambda folder: add_step(folder / FILE, number, entry))
        batch = step_batch(step, statistics, rules, reward_names, times, tell, first.rest)
        if not first.partition:
            return batch
        tokens = sum(row.num_tokens for row in first.early.rows)
        counts = (tokens, len(first.early.rows), first.moved, tokens if first.early.trained else 0)
        sums = [float(sum(column)) for column in zip(*gather(counts if batch.counted else (0,) * 4), strict=True)]
        names = ("train/packed_tokens", "train/micro_batches", "train/moved_groups", "train/early_tokens")
        more = {name: batch.metrics.get(name, 0.0) + number for name, number in zip(names, sums, strict=True)}
        return dataclasses.replace(
            batch,
            rows=(*first.early.rows, *batch.rows),
            groups=(*first.early.groups, *batch.groups),
            metrics=batch.metrics | more,
            trained=len(first.early.rows) if first.early.trained else 0,
            trained_metrics=first.early.metrics if first.early.trained and first.early.rows else None,
        )


class _SharedScoring(InScoring):
    def __init__(self, engine: Any, finished: FinishedGroups, stages: Stages, prompts: Sequence[Prompt]) -> None:
        super().__init__(stages, prompts)
        self._engine, self._finished = engine, finished
        self._share()

    def sample(self, prompts: Sequence[Prompt]) -> Generator[Group]:
        def serve() -> None:
            self.take()
            self._finished.serve()

        with after_each_step(self._engine, serve):
            yield from super().sample(prompts)

    def take(self, group: Group | None = None, position: int | None = None) -> None:
        super().take(group, position)
        self._share()

    def _share(self) -> None:
        for recorded in self.rewarded.values():
            if self._finished.wants(recorded.group.position):
                advantages = self.stages.compute_advantages(recorded.group, recorded.rewards.clone())
                self._finished.add(ScoredGroup(recorded.group, recorded.rewards, advantages))
