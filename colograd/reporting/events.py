"""`Events`: the one observer that the parts of a trainer tell what happens in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from transformers import TrainerCallback

from ..batch import Group, ScoredGroup
from .console import Console
from .metrics import PhaseTimes

T = TypeVar("T")


class NoRecord(TrainerCallback):
    """The recorder of a run without a record. An extension derives its own."""

    trackers: Any = None  # charts of trackers

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Wrap a training."""
        yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the sampling of a round on this rank."""
        yield

    def all_sampled(self) -> None:
        """Note that no rank samples any more."""

    def note(self, steps: Any, statistics: Any, combine: Any) -> None:
        """Add this rank's notes on a round to its statistics."""

    def sampled(self, whole: Any) -> None:
        """Record all ranks' statistics of the round's next step."""

    @contextlib.contextmanager
    def trains(self, step: Any) -> Iterator[None]:
        """Wrap a step's loss pass."""
        yield

    @contextlib.contextmanager
    def trains_early(self, rows: Any) -> Iterator[None]:
        """Wrap a loss pass of the next step's first rows."""
        yield

    def keep(self, row: Any, logprobs: Any) -> None:
        """Keep a micro-batch's log-probabilities, (N,)."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics."""

    def evaluated(self, groups: Sequence[ScoredGroup], name: str) -> None:
        """Record the groups of an evaluation."""


class LogsCompletions(Protocol):
    """The completions log, which an extension offers at the seam ``completion_log``: (trainer) -> a log, or None."""

    def keep(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None: ...
    def add(self, steps: Sequence[Sequence[ScoredGroup]], decode: Any, state: Any) -> None: ...
    def add_evaluation(self, groups: Sequence[ScoredGroup], decode: Any, state: Any, name: str) -> None: ...


class Events:
    """The console, the times of phases, the run's record and the log of completions, as one object."""

    def __init__(
        self, times: PhaseTimes, console: Console, recorder: NoRecord, completions: LogsCompletions | None = None
    ) -> None:
        self.times, self.console, self.recorder, self.completions = times, console, recorder, completions
        self._warned: set[str] = set()

    def warn_once(self, about: str, line: str) -> None:
        """Print a warning, unless there was one about the same thing, or ``line`` is empty."""
        if line and about not in self._warned:
            self._warned.add(about)
            self.console.warn(line)

    def decoded(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None:
        """Keep the texts of groups for the log of completions."""
        if self.completions is not None:
            self.completions.keep(groups, texts)

    def sampled(self, steps: Sequence[Sequence[ScoredGroup]], trainer: Any) -> None:
        """Log the groups of each optimizer step of a round. A collective."""
        if self.completions is not None:
            with self.times.phase("log"):
                self.completions.add(steps, trainer.decode, trainer.state)

    def evaluated(self, groups: Sequence[ScoredGroup], name: str, trainer: Any) -> None:
        """Record and log the groups of an evaluation. A collective."""
        self.recorder.evaluated(groups, name)
        if self.completions is not None:
            self.completions.add_evaluation(groups, trainer.decode, trainer.state, name)
