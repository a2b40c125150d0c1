"""Training beside the tail where ranks meet in each backward: one that still samples takes part from a second thread.

Ranks take turns of a micro-batch each. A rank that has sampled brings rows of finished groups, if there are any; one
without rows, or that samples, brings a filler of which no token is in the loss. Its thread mostly waits in exchanges,
and the engine's steps go on beside it. Turns begin when a rank that has sampled has rows, and end when all have
sampled: all ranks leave them after the same one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from ..batch import PackedRow, ScoredGroup
from ..parallel import watchdog
from ..parallel.ranks import gather, on_all_ranks
from ..policy.packing import dummy
from ..reporting.metrics import Metrics, PhaseTimes
from ..rollout.finished_groups import FinishedGroups
from .overlap import EarlyRows, rest

LOOK_EVERY = 0.1  # seconds between two looks for the first turn, and between two turns in which no rank has rows
Train = Callable[[Sequence[PackedRow], Metrics], Sequence[PackedRow]]


class JointTurns:
    """The turns of one round. Only one thread of a rank is in them at a time.

    Args:
        pack: rows of groups that this rank has taken.
        train: forward and backward of rows, whose losses' metrics it adds; returns the rows. A collective, of as many
            rows on each rank.
        fill_up: the same for fillers, in any thread.
        discard: forgets all gradients.
    """

    def __init__(
        self,
        finished: FinishedGroups,
        pack: Callable[[Sequence[ScoredGroup]], Sequence[PackedRow]],
        train: Train,
        fill_up: Train,
        discard: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._finished, self._pack, self._train, self._fill_up, self._discard = finished, pack, train, fill_up, discard
        self._device = device
        self._early = EarlyRows()
        self._is_over = False  # no rank takes another turn

    # -- while this rank samples

    @contextlib.contextmanager
    def beside_sampling(self) -> Iterator[None]:
        """Take part in other ranks' turns while the body samples.

        Raises:
            Exception: what the body raises, on all ranks that are in turns, or will be; what failed in a turn.
        """
        sampled = threading.Event()
        thread = threading.Thread(target=self._take_part, args=(sampled,), name="colograd-turns", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            self._end(thread, sampled)
            if not self._is_over:
                self._tell(error)
            raise
        self._end(thread, sampled)
        if self._finished.problem is not None:
            raise self._finished.problem

    def _take_part(self, sampled: threading.Event) -> None:
        try:
            with watchdog.aside(), _own_stream(self._device):
                while not (self._is_over or sampled.is_set()):
                    if not (self._finished.is_called() and self._turn((), samples=True)):
                        sampled.wait(LOOK_EVERY)
        except Exception as error:
            self._finished.problem = error  # which is raised between two steps of the engine

    def _end(self, thread: threading.Thread, sampled: threading.Event) -> None:
        sampled.set()
        watchdog.join(thread)

    def _tell(self, error: Exception) -> None:
        """Have the others' next turn fail with what failed here."""
        self._finished.call()
        self._is_over = True
        with on_all_ranks("the rollout"):
            raise error

    # -- when it has sampled

    def train(self, budget: int, times: PhaseTimes) -> EarlyRows:
        """Train finished groups until all ranks have sampled.

        Args:
            budget: tokens of a micro-batch.

        Returns:
            What was trained, with a filler for each micro-batch that only others had rows for: as many rows on each
            rank. Groups without rows: memory ran out on a rank, and all ranks have dropped their gradients.
        """
        finished = self._finished
        while not self._is_over:
            groups = [] if finished.all_sampled() else finished.take(budget)
            if groups:
                finished.call()
            with times.phase("wait") if not groups else contextlib.nullcontext():
                comes = finished.is_called() or finished.all_sampled()
                if not (comes and self._turn(groups, samples=False)):
                    rest(finished)
        return self._early

    # -- both

    def _turn(self, groups: Sequence[ScoredGroup], samples: bool) -> bool:
        """One turn, in which all ranks are; False: none has rows. A collective."""
        over, self._is_over = self._is_over, True  # if it fails
        assert not over
        self._early.groups += groups
        try:
            with on_all_ranks("the rollout"):
                rows = self._pack(groups)
            ranks = gather((len(rows), samples))
            most = max(count for count, _ in ranks)
            if most:
                fillers = (dummy(self._device),) * (most - len(rows))
                train = self._train if rows else self._fill_up
                with on_all_ranks("training"):
                    self._early.rows += train((*rows, *fillers), self._early.metrics)
            self._is_over = not most and not any(samples for _, samples in ranks)
            return most > 0
        except torch.OutOfMemoryError:
            pass
        # The exception, whose traceback holds activations, is gone.
        self._early = EarlyRows(self._early.groups)
        self._discard()
        return False


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU a rank waits for others in a stream of kernels, behind which the engine's steps must not wait."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # weights, and memory that was freed there
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all rounds: each stream has a pool of memory of its own."""
    return torch.cuda.Stream(device)
