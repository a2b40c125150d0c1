"""Assign a step's scored groups to ranks, pack them into micro-batches, and count tokens and completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..batch import SampledStep, ScoredGroup, StepBatch
from ..config import GRPOConfig
from ..losses.objective import Objective
from ..parallel.balance import balance, pair_cost
from ..parallel.ranks import gather, rank
from ..policy.loading import Policy
from ..policy.packing import PackingRules, has_signal, loss_tokens, pack_step
from ..reporting.metrics import PhaseTimes
from ..rollout.statistics import RolloutStatistics
from ..runtime.sizes import active_parameters


def packing_rules(config: GRPOConfig, policy: Policy, objective: Objective, equal_counts: bool) -> PackingRules:
    """Return a run's rules for packing groups into micro-batches. ``max_tokens`` is 0 until the limit is measured."""
    return PackingRules(
        max_tokens=config.token_budget,
        mask_truncated=config.mask_truncated_completions,
        skip_without_signal=not objective.every_group,
        share_prompts=not policy.why_padded,
        balance_ranks=config.balance_ranks and config.layout.data_size > 1,
        equal_counts=equal_counts,
        pair_cost=pair_cost(policy.model.config, active_parameters(policy.model)),
        device=config.device,
        ranks_per_engine=config.layout.ranks_per_engine,
        ranks_per_row=config.layout.ranks_per_row,
    )


def step_batch(
    step: SampledStep,
    statistics: RolloutStatistics,
    rules: PackingRules,
    reward_names: Sequence[str],
    times: PhaseTimes,
    tell: Callable[[RolloutStatistics], None] | None = None,
    groups: Sequence[ScoredGroup] | None = None,
) -> StepBatch:
    """Balance a step's groups over ranks, pack them into micro-batches, and sum counts over ranks. A collective call.

    Args:
        statistics: statistics of the groups that this rank sampled for the step. The step's metrics come from them.
        tell: function to call with the joined statistics of all ranks.
        groups: groups to pack, by default all groups of the step. An extension may have packed the missing groups.
    """
    with times.phase("pack"):
        moved = 0
        if groups is None:  # groups with equal rewards have no gradient, but count in metrics and denominators
            groups = [one for one in step.kept if has_signal(one) or not rules.skip_without_signal]
        if rules.balance_ranks or max(rules.ranks_per_engine, rules.ranks_per_row) > 1:
            sizes = rules.ranks_per_engine, rules.balance_ranks, rules.ranks_per_row
            groups, moved = balance(groups, rules.pair_cost, rules.share_prompts, *sizes)
        rows = pack_step(groups, rules)
    counted = rank() % rules.ranks_per_row == 0
    rollouts = [rollout for scored in step.kept for rollout in scored.group.rollouts]
    in_loss = sum(int(loss_tokens(rollout, rules.mask_truncated).sum()) for rollout in rollouts)
    # Counts to sum over ranks: tokens in the loss, completions, packed tokens, micro-batches, and groups that `balance`
    # sent to a different rank. If several ranks train equal rows, only the first rank counts the rows' numbers.
    tokens = sum(part.num_tokens for row in rows for part in row.parts)
    work = (tokens, len(rows), moved) if counted else (0, 0, 0)
    ranks = gather(((in_loss, len(rollouts), *work), statistics))
    columns = zip(*(numbers for numbers, _ in ranks), strict=True)
    in_loss, completions, packed_tokens, micro_batches, moved = map(sum, columns)
    sampled = RolloutStatistics.join(statistics for _, statistics in ranks)
    if tell is not None:
        tell(sampled)
    metrics = sampled.metrics(reward_names) | {
        "train/packed_tokens": float(packed_tokens),
        "train/micro_batches": float(micro_batches),
        "train/moved_groups": float(moved),
        "train/sampled_tokens": float(sum(sampled.lengths)),
        # Like TRL's `num_tokens`: tokens of prompts and tokens that the model sampled, without tools' answers.
        "train/rollout_tokens": float(sampled.prompt_tokens + sum(sampled.lengths)),
    }
    return StepBatch(rows, in_loss, completions, metrics, tuple(groups), counted=counted)
