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
from .first_rows import EarlyRows
from .overlap import rest

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
        self._rows: list[PackedRow] = []  # of the groups that were taken: still to train
        self._is_over = False  # no rank takes another turn

    # -- while this rank samples

    @contextlib.contextmanager
    def beside_sampling(self) -> Iterator[None]:
        """Take part in other ranks' turns while the body samples.

        Raises:
            Exception: what the body raises, on all ranks that are in turns, or will be; what failed in a turn.
        """
        sampled = threading.Event()
        weights = None if self._device.type != "cuda" else torch.cuda.current_stream(self._device)
        thread = threading.Thread(target=self._take_part, args=(sampled, weights), name="colograd-turns", daemon=True)
        thread.start()
        try:
            yield
            self._end(thread, sampled)
            if self._finished.problem is not None:
                raise self._finished.problem
        except Exception as error:
            self._end(thread, sampled)
            if not self._is_over:
                self._tell(error)
            raise
        finally:
            sampled.set()  # also where the user ends the run: the thread begins no other turn

    def _take_part(self, sampled: threading.Event, weights: torch.cuda.Stream | None) -> None:
        try:
            with watchdog.aside(), _own_stream(self._device, weights):
                while not (self._is_over or sampled.is_set()):
                    if not (self._finished.is_called() and self._turn((), samples=True)):
                        sampled.wait(LOOK_EVERY)
        except Exception as error:
            self._finished.problem = error  # which is raised between two steps of the engine

    def _end(self, thread: threading.Thread, sampled: threading.Event) -> None:
        sampled.set()
        watchdog.join(thread)

    def _tell(self, error: Exception) -> None:
        """Have the others' next turn fail with what failed here, which isn't a turn's want of memory if that is it."""
        self._finished.call()
        self._is_over = True
        with on_all_ranks("the rollout"):
            raise error if not isinstance(error, torch.OutOfMemoryError) else RuntimeError(str(error)) from error

    # -- when it has sampled

    def train(self, budget: int, times: PhaseTimes) -> EarlyRows:
        """Train finished groups until all ranks have sampled.

        Args:
            budget: tokens of a micro-batch.

        Returns:
            What was trained, with a filler for each micro-batch that only others had rows for: as many rows on each
            rank. Where memory ran out on a rank, all ranks have dropped what they had trained until then.
        """
        finished = self._finished
        while not self._is_over:
            groups = [] if self._rows or finished.all_sampled() else finished.take(budget)
            if groups:
                finished.call()
            idle = not (groups or self._rows)
            with times.phase("wait") if idle else contextlib.nullcontext():
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
                self._rows += self._pack(groups)
            ranks = gather((bool(self._rows), samples))
            trains = any(has_rows for has_rows, _ in ranks)
            if trains:
                train = self._train if self._rows else self._fill_up
                row = self._rows.pop(0) if self._rows else dummy(self._device)
                with on_all_ranks("training"):
                    self._early.rows += train((row,), self._early.metrics)
            self._is_over = not trains and not any(samples for _, samples in ranks)
            return trains
        except torch.OutOfMemoryError:
            pass
        # The exception, whose traceback holds activations, is gone.
        self._early, self._rows = EarlyRows(), []  # groups that it took are their owners' again: see `first_rows`
        self._discard()
        return False


@contextlib.contextmanager
def _own_stream(device: torch.device, weights: torch.cuda.Stream | None) -> Iterator[None]:
    """On a GPU a rank waits for others in a stream of kernels, behind which the engine's steps must not wait.

    Args:
        weights: the stream on which the weights were changed, and memory was freed.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = _stream(device)
    stream.wait_stream(weights)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all rounds: each stream has a pool of memory of its own."""
    return torch.cuda.Stream(device)
