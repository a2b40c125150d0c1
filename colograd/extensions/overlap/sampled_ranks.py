"""Training during the tail of sampling: a rank that has sampled trains its groups while other ranks still decode.

It also takes finished groups from these ranks. `beside_decoding` trains between the steps of a rank's own engine.

No weight changes before the optimizer's step, so the groups are on-policy whenever they are trained. Gradients add up
unnormalised, and ranks exchange nothing meanwhile. When all have sampled, ranks continue, in smaller and smaller
micro-batches, until none of them trains. The remaining groups are balanced, packed and trained as without `overlap`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ...batch import PackedRow, ScoredGroup
from ...parallel import watchdog
from ...reporting.metrics import Metrics, PhaseTimes
from .finished_groups import FinishedGroups
from .first_rows import EarlyRows

EVERY = 0.01  # seconds between two polls for finished groups


def train_while_others_sample(
    finished: FinishedGroups,
    train: Callable[[Sequence[ScoredGroup], Metrics], Sequence[PackedRow]],
    budget: int,
    times: PhaseTimes,
    early: EarlyRows,
) -> EarlyRows:
    """Train finished groups, micro-batch by micro-batch, until no rank samples or trains a micro-batch any more.

    Args:
        train: function (groups, metrics) -> rows that runs forward and backward, and adds to the metrics.
        budget: tokens of a micro-batch.
        early: rows that this rank trained while it sampled itself.

    Returns:
        All rows trained early, with ``early``.
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
        # The exception is gone, and with it the activations. The other ranks learn of it when they have sampled.
        return EarlyRows(early.groups)
    return early


def rest(finished: FinishedGroups) -> None:
    """Sleep between two polls for finished groups."""
    watchdog.progress("waiting for ranks that sample")
    time.sleep(EVERY * max(1.0, finished.layout.world_size / 8))  # one store answers all ranks
