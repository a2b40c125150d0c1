"""Training beside the tail of sampling: a rank that has sampled its groups trains them while others still decode, and
takes finished groups from these. Between the steps of its own engine: `beside_decoding`.

No weight changes before the optimizer's step, so the groups are on-policy whenever they are trained. Gradients add up
unnormalised; ranks exchange nothing meanwhile (where they meet in each backward: `joint_overlap`). When all have
sampled, ranks go on, in ever smaller micro-batches, until none of them trains. What is left then is balanced, packed
and trained as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import PackedGroup, PackedRow, ScoredGroup
from ..config import GRPOConfig
from ..losses.advantages import AdvantageEstimator
from ..losses.objective import Objective
from ..losses.token_losses import LOSSES
from ..memory.device_turns import device_turns_of
from ..parallel import watchdog
from ..parallel.balance import exchange
from ..parallel.ranks import gather, rank
from ..policy.packing import NOBODY, PackingRules, advantages_of, dummy, teacher_named
from ..reporting.metrics import Metrics, PhaseTimes
from ..rollout.finished_groups import FinishedGroups, OwnGroups
from ..rollout.partition import Partition, Row, fits, has_equal_counts, pieces_of
from ..sharding import ShardingStrategy

EVERY = 0.01  # seconds between two looks for finished groups
TAIL = 4  # an engine is in its tail when the sequences that run are this part of the most that ran at once


@dataclass
class EarlyRows:
    """What a rank has trained of a step before ranks exchange groups."""

    groups: list[ScoredGroup] = field(default_factory=list)  # that it took, its own or others'
    rows: list[PackedRow] = field(default_factory=list)  # of these groups: their gradients are made
    metrics: Metrics = field(default_factory=Metrics)  # of the rows' losses

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out: all gradients are to be dropped, and the groups are trained with the others."""
        return bool(self.groups) and not self.rows


def train_while_others_sample(
    finished: FinishedGroups,
    train: Callable[[Sequence[ScoredGroup], Metrics], Sequence[PackedRow]],
    budget: int,
    times: PhaseTimes,
    early: EarlyRows,
) -> EarlyRows:
    """Train finished groups, micro-batch by micro-batch, until no rank samples any more and none is amid one.

    Args:
        train: forward and backward of some groups, whose losses' metrics it adds; returns their rows.
        budget: tokens of a micro-batch.
        early: what this rank trained while it sampled itself.

    Returns:
        What was trained, that included.
    """
    while not finished.is_over():
        groups = finished.take(budget)
        if not groups:
            with times.phase("wait"):
                rest(finished)
            continue
        early.groups += groups
        try:
            with finished.training():
                early.rows += train(groups, early.metrics)
            continue
        except torch.OutOfMemoryError:
            pass
        # The exception, whose traceback holds activations, is gone. The others may be told when they have sampled.
        return EarlyRows(early.groups)
    return early


def rest(finished: FinishedGroups) -> None:
    """Between two looks for finished groups."""
    watchdog.progress("waiting for ranks that sample")
    time.sleep(EVERY * max(1.0, finished.layout.world_size / 8))  # one store answers all ranks


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A step's groups on this rank, divided into those whose rows come first and the rest, which is still to pack."""

    rest: list[ScoredGroup]
    groups: tuple[ScoredGroup, ...] = ()  # of the rows
    rows: tuple[PackedRow, ...] = ()
    trained: bool = False  # whether the rows' gradients are made
    moved: int = 0  # of the groups: how many another engine sampled
    partition: Partition = ()  # the first rows of all ranks


def first_rows(
    groups: Sequence[ScoredGroup], early: EarlyRows | None, recorded: Partition | None, rules: PackingRules
) -> FirstRows:
    """Divide a step's groups. A collective, unless both ``early`` and ``recorded`` are None.

    Args:
        groups: this rank's own that are to be packed.
        early: what this rank has trained.
        recorded: of all ranks, when the step was trained before; then nothing is trained, and the same rows come first.
            Ranks that train rows together can't have it, as it may give them different ones, nor those that step
            together one of ranks that didn't.
    """
    if recorded is not None and (rules.ranks_per_row > 1 or (rules.equal_counts and not has_equal_counts(recorded))):
        recorded = None
    if early is None and recorded is None:
        return FirstRows([*groups])
    own = [(scored.group.position, len(scored.group.rollouts)) for scored in groups]
    held: Sequence[Sequence[tuple[int, int]]]
    if recorded is None:
        assert early is not None
        held, partition = zip(*gather((own, tuple(map(_row_of, early.rows)))), strict=True)
        trained = bool(early.rows)
    else:
        held, partition, trained = gather(own), recorded, False
        if len(recorded) != len(held) or not fits(recorded, dict(entry for of_rank in held for entry in of_rank)):
            return FirstRows([*groups])  # of another number of ranks, say: the update is equal up to rounding
        early = _as_recorded(groups, recorded, held, rules)
    owners = {position: owner for owner, of_rank in enumerate(held) for position, _ in of_rank}
    # What a rank took and has no rows of, as memory ran out there, is its owner's again.
    taken = {position for position, _ in pieces_of(partition)}
    rest = [scored for scored in groups if scored.group.position not in taken]
    if not early.rows:
        return FirstRows(rest, partition=partition)
    engine = rank() // rules.ranks_per_engine
    moved = sum(owners[scored.group.position] // rules.ranks_per_engine != engine for scored in early.groups)
    return FirstRows(rest, tuple(early.groups), tuple(early.rows), trained, moved, partition)


def _as_recorded(
    groups: Sequence[ScoredGroup], recorded: Partition, held: Sequence[Sequence[tuple[int, int]]], rules: PackingRules
) -> EarlyRows:
    """This rank's groups and rows of a recorded partition; they aren't trained yet. A collective.

    Args:
        held: position and size of each rank's groups.
    """
    places = {position: (owner, index) for owner, row in enumerate(held) for index, (position, _) in enumerate(row)}
    positions = [dict.fromkeys(position for position, _ in pieces_of((rows,))) for rows in recorded]
    taken = exchange(groups, [[places[position] for position in of_rank] for of_rank in positions])
    by_position = {scored.group.position: scored for scored in taken}
    return EarlyRows(taken, [_row_from(row, by_position, rules) for row in recorded[rank()]])


def _row_of(row: PackedRow) -> Row:
    return tuple((part.ids[0].position, tuple(identity.index for identity in part.ids)) for part in row.parts)


def _row_from(row: Row, groups: dict[int, ScoredGroup], rules: PackingRules) -> PackedRow:
    if row[0][0] == NOBODY:
        return dummy(rules.device)
    parts = []
    for position, indices in row:
        group, advantages = groups[position].group, advantages_of(groups[position])
        ids = tuple(group.rollout_ids[index] for index in indices)
        rollouts, teacher = tuple(group.rollouts[index] for index in indices), teacher_named(groups[position])
        parts.append(PackedGroup(ids, rollouts, tuple(advantages[index] for index in indices), teacher))
    return PackedRow(tuple(parts), rules.mask_truncated, rules.device)


# -- whether a run can


def why_not(
    config: GRPOConfig,
    objective: Objective,
    estimator: AdvantageEstimator,
    sharding: type[ShardingStrategy],
    replaced: Callable[[str], bool],
) -> str:
    """Why all groups of a step wait for the last one; empty: they needn't.

    Args:
        replaced: whether a subclass of the trainer overrides a stage.
    """
    meets, takes_turns = sharding.meets_in_backward, device_turns_of(config)
    exchange_too = f"with sharding: {config.sharding} ranks exchange in each backward"
    reasons: list[tuple[Any, str]] = [
        (config.sequence_parallel_size > 1, "with sequence_parallel_size ranks exchange in each forward"),
        (meets and config.layout.ranks_per_engine > 1, f"{exchange_too}, and those of an engine in each of its steps"),
        (meets and takes_turns, f"{exchange_too}, for which one that samples has no memory with {takes_turns}"),
        (config.dynamic_sampling, "dynamic_sampling chooses the step's groups among all that were sampled"),
        (estimator.step_scores is not None, "advantages are divided by a deviation over the step"),
        (objective.top_entropy_quantile < 1, "top_entropy_quantile is of all the step's tokens"),
        (objective.entropy_bonus, "the entropy's bonus is a mean over the step"),
        (objective.router_coef != 0, "the load-balancing loss is weighted by the step's tokens"),
        (objective.distillation_weight != 0, "a teacher's term isn't trained early"),
        (type(objective.loss) not in LOSSES.values(), "a loss of your own may read the step's constants"),
        (replaced("compute_loss"), "a compute_loss of your own may read the step's constants"),
        (replaced("compute_advantages"), "a compute_advantages of your own is called in the order of the prompts"),
        (config.offload_reference and not config.on_cpu, "offload_reference has no room beside gradients"),
        (config.full_determinism, "full_determinism forbids sums whose order depends on clocks"),
    ]
    return next((reason for applies, reason in reasons if applies), "")


def finished_groups(config: GRPOConfig, why: str, accepts: Callable[[ScoredGroup], bool]) -> OwnGroups | None:
    """The finished groups that are trained before all are sampled; None: nothing is."""
    if config.overlap == "off" or why:
        return None
    if config.world_size == 1:
        return None if config.why_not_between_steps else OwnGroups(accepts)
    return FinishedGroups(config.layout, config.balance_ranks and config.layout.data_size > 1, accepts)


def describe(config: GRPOConfig, why: str, meets: bool = False, submits_later: bool = False) -> str:
    """A line for the start of a run: what is trained before all is sampled, and why not; empty: nothing was asked for.

    Args:
        meets: whether ranks exchange in each backward.
        submits_later: see `Sampler.submits_later`.
    """
    alone, not_between = config.world_size == 1, config.why_not_between_steps
    if meets:
        not_between = not_between or f"with sharding: {config.sharding} ranks exchange in each backward"
    if submits_later:
        not_between = not_between or "with tools, an agent or a rollout_func more sequences may come at any time"
    if config.overlap == "off":
        return ""
    if why:
        until = "all groups are sampled" if alone else "all ranks have sampled"
        return f"overlap: nothing is trained before {until}, as {why}"
    later = "; only for the first optimizer step of each round" if config.round_length > 1 else ""
    tail = f"when at most 1/{TAIL} of its sequences are left"
    if alone:
        if not_between:
            return f"overlap: nothing is trained between the engine's steps, as {not_between}"
        return f"overlap: finished groups are trained between the engine's steps {tail}{later}"
    return (
        "overlap: a rank that has sampled trains its groups"
        + (", and finished ones of other ranks," if config.balance_ranks else "")
        + " while others sample; between its own engine's steps "
        + (f"nothing, as {not_between}" if not_between else f"finished ones {tail}")
        + later
    )
