"""`Events`: the one observer that the parts of a trainer tell what happens in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..batch import Group, ScoredGroup
from .completion_log import CompletionLog
from .console import Console
from .metrics import PhaseTimes


class Events:
    """The console, the times of phases, the run's record and the log of completions, as one object.

    Args:
        recorder: writes the run's record: `training.recording.Recorder`.
        completions: None: completions aren't logged.
    """

    def __init__(
        self, times: PhaseTimes, console: Console, recorder: Any, completions: CompletionLog | None = None
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
