"""Training between the steps of a rank's own engine: in the tail of its sampling a rank trains its finished groups, one
micro-batch at a time.

Few sequences keep a GPU waiting for its memory most of the time. There a micro-batch is queued between two steps and
never waited for; the engine's steps go before it (`engine/step_stream.py`). The next one is queued when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..batch import PackedRow, ScoredGroup
from ..engine.load import Load
from ..reporting.metrics import Metrics
from ..rollout.finished_groups import OwnGroups
from .first_rows import EarlyRows
from .loss_pass import check_finite

TAIL = 4  # an engine is in its tail when the sequences that run are this part of the most that ran at once

# Tokens of a micro-batch that keep a GPU busy, whose products are bound by arithmetic from some hundreds of tokens on:
# a smaller one costs the decoding more (its launches) than it spares the step.
ENOUGH = 8192

# Queues forward and backward of micro-batches, whose losses' metrics it adds, and their losses, which it doesn't read;
# returns them with what second models say of them.
TrainRows = Callable[[Sequence[PackedRow], Metrics, list[torch.Tensor]], Sequence[PackedRow]]


class BesideDecoding:
    """What a rank trains of a step while it samples.

    Args:
        pack: micro-batches of some groups.
        train: see `TrainRows`.
        drop_gradients: forgets those of all micro-batches.
        arrived: is told when a micro-batch that was queued is done.
        device: that trains.
    """

    def __init__(
        self,
        pack: Callable[[Sequence[ScoredGroup]], Sequence[PackedRow]],
        train: TrainRows,
        drop_gradients: Callable[[], None],
        arrived: Callable[[], None],
        device: torch.device,
    ) -> None:
        self.pack, self.train, self.drop_gradients = pack, train, drop_gradients
        self.arrived, self.device = arrived, device
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self.early = EarlyRows()
        self._rows: list[PackedRow] = []  # of the groups that were taken: still to train
        self._losses: list[torch.Tensor] = []
        self._most = 0  # sequences that ran at once
        self._queued: Any = None  # the event after the last micro-batch on a GPU

    def after_step(self, finished: OwnGroups, load: Load, budget: int) -> None:
        """Train a micro-batch, if this is the tail, enough is finished, and the device is done with the one before.
        Where a rank that has sampled wants groups, they are left to it: it has nothing else to do.

        Args:
            budget: tokens of a micro-batch.
        """
        self._most = max(self._most, load.running)
        if load.waiting or not 0 < load.running * TAIL <= self._most or self.early.out_of_memory:
            return
        if not self._is_done() or not (self._rows or self._take(finished, budget)):
            return
        self._train_next()

    def wait(self) -> None:
        """Wait until the device is done with what was queued."""
        if self._queued is not None:
            self._queued.synchronize()
            self._is_done()

    def end(self, version: int) -> EarlyRows:
        """Train the rest of the groups that were taken, when this rank has sampled.

        Args:
            version: of the weights, for an error.

        Returns:
            What was trained in this round.

        Raises:
            FloatingPointError: a loss isn't finite.
        """
        while self._rows:
            self._train_next()
        self.wait()
        check_finite(self._losses, version + 1)
        self._losses = []
        return self.early

    def _take(self, finished: OwnGroups, budget: int) -> bool:
        """Take groups for a micro-batch, if there are enough; whether there were."""
        if finished.is_wanted or finished.tokens_left < min(budget, ENOUGH):
            return False
        groups = finished.take_own(budget)
        self.early.groups += groups
        self._rows = [*self.pack(groups)]
        return bool(groups)

    def _train_next(self) -> None:
        row = self._rows.pop(0)
        try:
            self.early.rows += self.train([row], self.early.metrics, self._losses)
            if self.device.type == "cuda":
                self._queued = torch.cuda.Event()
                self._queued.record()
            return
        except torch.OutOfMemoryError:
            pass
        # The exception, whose traceback holds activations, is gone.
        self.early, self._rows, self._losses = EarlyRows(self.early.groups), [], []
        self.drop_gradients()

    def _is_done(self) -> bool:
        if self._queued is not None and self._queued.query():
            self._queued = None
            self.arrived()
        return self._queued is None
