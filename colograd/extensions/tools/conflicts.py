"""Settings of tools that can't be combined with other settings."""

from __future__ import annotations

from ...config.conflicts import SET, Conflict, When

CONFLICTS = (
    Conflict(
        "tool_timeout", SET, "rank_timeout", When("that isn't longer", lambda seconds: seconds is not None),
        "a rank may wait for one call as long as tool_timeout, and would be ended for it",
        "raise rank_timeout above it, or lower tool_timeout",
        lambda settings: settings.tool_timeout >= settings.rank_timeout,
    ),
)  # fmt: skip
