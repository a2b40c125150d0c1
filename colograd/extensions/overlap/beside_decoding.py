"""Training between the steps of a rank's own engine, in the tail of its sampling.

With few sequences a GPU mostly waits for its memory, so a rank then trains its finished groups, one micro-batch at a
time. A micro-batch is queued between two engine steps, and nothing waits for it. The engine's steps go before it
(`extensions/overlap/engine/step_stream.py`). The next micro-batch is queued when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...batch import PackedRow, ScoredGroup
from ...engine.load import Load
from ...reporting.metrics import Metrics
from ...training.loss_pass import check_finite
from .finished_groups import OwnGroups
from .first_rows import EarlyRows

TAIL = 4  # in the tail at most 1/TAIL of the peak number of sequences runs

# Tokens of a micro-batch that keep a GPU busy. Its products are bound by arithmetic from some hundreds of tokens on,
# but a smaller micro-batch costs the decoding more (its launches) than it saves the step.
ENOUGH = 8192

# (rows, metrics, losses) -> rows. Queue forward and backward of the rows, add to the metrics, append the losses without
# reading them, and return the rows with the second models' log-probabilities.
TrainRows = Callable[[Sequence[PackedRow], Metrics, list[torch.Tensor]], Sequence[PackedRow]]


class BesideDecoding:
    """The training of a step's first groups while this rank samples.

    Args:
        pack: function that packs groups into micro-batches.
        train: see `TrainRows`.
        drop_gradients: function that drops the gradients of all micro-batches.
        arrived: function to call when a queued micro-batch is done.
        device: device of the training.
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
        self._rows: list[PackedRow] = []  # untrained rows of the groups taken so far
        self._losses: list[torch.Tensor] = []
        self._most = 0  # largest number of sequences that ran at once
        self._queued: Any = None  # the event after the last micro-batch on a GPU

    def after_step(self, finished: OwnGroups, load: Load, budget: int) -> None:
        """Train a micro-batch, if this is the tail, enough is finished, and the device is done with the one before.

        If a rank that has sampled wants groups, it gets them, because it has nothing else to do.

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
        """Wait until the device is done with the queued micro-batch."""
        if self._queued is not None:
            self._queued.synchronize()
            self._is_done()

    def end(self, version: int) -> EarlyRows:
        """Train the remaining rows of the taken groups, after this rank has sampled.

        Args:
            version: optimizer step of the weights, for an error's text.

        Returns:
            The rows trained in this round, with their groups and metrics.

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
        """Take groups for a micro-batch, if there are enough; return whether there were."""
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
        # The exception is gone, and with it the activations that its traceback held.
        self.early, self._rows, self._losses = EarlyRows(self.early.groups), [], []
        self.drop_gradients()

    def _is_done(self) -> bool:
        if self._queued is not None and self._queued.query():
            self._queued = None
            self.arrived()
        return self._queued is None
