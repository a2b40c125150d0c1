"""What of a run's rollouts is kept on the disk, so that none is paid for twice."""

from __future__ import annotations

from dataclasses import dataclass

from .knob import knob, one_of

JOURNALS = ("off", "until_checkpoint", "keep")


@dataclass
class JournalKnobs:
    """The journal."""

    journal: str | None = knob(
        None,
        "Record every group when it is scored (`_journal/` in the run's folder), so that a resumed run neither samples "
        "nor scores it again. `until_checkpoint`: what the last two checkpoints have made needless is deleted; `keep`: "
        "nothing is; `off`. Unset: `until_checkpoint` in a run that saves checkpoints.",
    )

    @property
    def keeps_journal(self) -> bool:
        """Whether groups are recorded."""
        return self.journal != "off"

    def _resolve_journal(self, saves: bool) -> None:
        """Raises ValueError for another value."""
        if self.journal is None:
            self.journal = "until_checkpoint" if saves else "off"
        if self.journal is False:  # what YAML makes of a bare `off`
            self.journal = "off"
        one_of(self, "journal", JOURNALS)
