"""Checkpoints: how they are written, and what becomes of a run whose checkpoints can't be."""

from __future__ import annotations

from dataclasses import dataclass

from .knob import at_least, knob


@dataclass
class SavingKnobs:
    """Checkpoints."""

    save_in_background: bool = knob(
        True,
        "Write checkpoints from a copy in host memory while training goes on. Where something needs the files at once "
        "(a push to the Hub, a callback's `on_save`), or the memory for the copy isn't there, training waits for them.",
    )
    save_failures: int = knob(
        3, "Checkpoints in a row that can't be written (a full disk, say) before the run ends with the error."
    )

    def _check_saving(self) -> None:
        at_least(self, 1, "save_failures")
