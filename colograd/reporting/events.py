"""`Events`: passes a run's events to the console, the phase times, the run's record and the completions log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import TrainerCallback

from ..batch import Group, ScoredGroup
from .console import Console
from .metrics import PhaseTimes


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


class NoRecord(TrainerCallback):
    """The recorder of a run that isn't recorded. An extension's recorder overrides all methods."""

    trackers: Any = None  # An object that sends charts to trackers such as wandb, or None.

    def nothing(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing. Return an empty context manager, for methods such as `run` that callers use with `with`."""
        return _nothing()

    # Contexts. `run`: a whole training. `watching`: sampling on this rank. `trains`: forward and backward passes of an
    # optimizer step. `trains_early`: passes of rows that are trained while other ranks still sample.
    run = watching = trains = trains_early = nothing
    # Events. `note`: this rank's data for a step's statistics. `sampled`: a step's statistics of rollouts on all ranks.
    # `keep`: the trainer's log-probabilities (N,) of a micro-batch. `step`: a step's metrics.
    all_sampled = note = sampled = keep = step = evaluated = nothing


class Events:
    def __init__(self, times: PhaseTimes, console: Console, recorder: NoRecord, completions: Any = None) -> None:
        self.times, self.console, self.recorder = times, console, recorder
        self.completions = completions  # The completions log (seam "completion_log"), or None.
        self._warned: set[str] = set()

    def warn_once(self, about: str, line: str) -> None:
        if line and about not in self._warned:
            self._warned.add(about)
            self.console.warn(line)

    def decoded(self, groups: Sequence[Group], texts: Sequence[list[str]]) -> None:
        if self.completions is not None:
            self.completions.keep(groups, texts)

    def sampled(self, steps: Sequence[Sequence[ScoredGroup]], trainer: Any) -> None:
        """Write the scored groups of each optimizer step to the completions log. All ranks must call this."""
        if self.completions is not None:
            with self.times.phase("log"):
                self.completions.add(steps, trainer.decode, trainer.state)

    def evaluated(self, groups: Sequence[ScoredGroup], name: str, trainer: Any) -> None:
        """Pass an evaluation's groups to the recorder and to the completions log. All ranks must call this."""
        self.recorder.evaluated(groups, name)
        if self.completions is not None:
            self.completions.add_evaluation(groups, trainer.decode, trainer.state, name)
