"""`Events`: passes a run's events to the console, the phase times, the run's record and the completions log."""

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
    """The recorder of a run that isn't recorded: its methods do nothing. An extension's recorder overrides all."""

    trackers: Any = None  # Charts that a recorder sends to trackers such as wandb.

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Context of a whole training."""
        yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the sampling of completions on this rank."""
        yield

    def all_sampled(self) -> None:
        """Called when all ranks have finished sampling."""

    def note(self, steps: Any, statistics: Any, combine: Any) -> None:
        """Add data that this rank recorded during sampling to the rank's statistics."""

    def sampled(self, whole: Any) -> None:
        """Record the rollout statistics of the next optimizer step, summed over all ranks."""

    @contextlib.contextmanager
    def trains(self, step: Any) -> Iterator[None]:
        """Context of the forward and backward passes of one optimizer step."""
        yield

    @contextlib.contextmanager
    def trains_early(self, rows: Any) -> Iterator[None]:
        """Context of forward and backward passes of rows that are trained while other ranks still sample."""
        yield

    def keep(self, row: Any, logprobs: Any) -> None:
        """Record the trainer's log-probabilities of a micro-batch, (N,), one per token."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an optimizer step."""

    def evaluated(self, groups: Sequence[ScoredGroup], name: str) -> None:
        """Record the scored groups of an evaluation."""


class LogsCompletions(Protocol):
    """The completions log. An extension offers a function (trainer) -> log or None, named ``completion_log``."""

    def keep(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None: ...
    def add(self, steps: Sequence[Sequence[ScoredGroup]], decode: Any, state: Any) -> None: ...
    def add_evaluation(self, groups: Sequence[ScoredGroup], decode: Any, state: Any, name: str) -> None: ...


class Events:
    """The console, the phase times, the run's record and the completions log as one object, for all parts of a run."""

    def __init__(
        self, times: PhaseTimes, console: Console, recorder: NoRecord, completions: LogsCompletions | None = None
    ) -> None:
        self.times, self.console, self.recorder, self.completions = times, console, recorder, completions
        self._warned: set[str] = set()

    def warn_once(self, about: str, line: str) -> None:
        """Log a warning unless ``line`` is empty, or a warning with the key ``about`` was logged before."""
        if line and about not in self._warned:
            self._warned.add(about)
            self.console.warn(line)

    def decoded(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None:
        """Pass the decoded texts of groups to the completions log."""
        if self.completions is not None:
            self.completions.keep(groups, texts)

    def sampled(self, steps: Sequence[Sequence[ScoredGroup]], trainer: Any) -> None:
        """Write the scored groups of each optimizer step to the completions log. A collective: all ranks must call."""
        if self.completions is not None:
            with self.times.phase("log"):
                self.completions.add(steps, trainer.decode, trainer.state)

    def evaluated(self, groups: Sequence[ScoredGroup], name: str, trainer: Any) -> None:
        """Write an evaluation's groups to the record and the completions log. A collective: all ranks must call."""
        self.recorder.evaluated(groups, name)
        if self.completions is not None:
            self.completions.add_evaluation(groups, trainer.decode, trainer.state, name)
