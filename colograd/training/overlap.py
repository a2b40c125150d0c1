"""Training beside the tail of sampling: a rank that has sampled its groups trains them while others still decode, and
takes finished groups from these. Between the steps of its own engine: `beside_decoding`.

No weight changes before the optimizer's step, so the groups are on-policy whenever they are trained. Gradients add up
unnormalised; ranks exchange nothing meanwhile. When all have sampled, ranks go on, in ever smaller micro-batches, until
none of them trains. What is left then is balanced, packed and trained as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..batch import PackedRow, ScoredGroup
from ..parallel import watchdog
from ..reporting.metrics import Metrics, PhaseTimes
from ..rollout.finished_groups import FinishedGroups
from .first_rows import EarlyRows

EVERY = 0.01  # seconds between two looks for finished groups


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
