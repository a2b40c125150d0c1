"""Settings that can't be combined with a curriculum."""

from __future__ import annotations

from ...config.conflicts import ANY, SET, Conflict, equal

CONFLICTS = (
    Conflict(
        "curriculum", ANY, "dynamic_sampling", SET,
        "both choose further prompts, by different rules", "remove one of them",
    ),
    Conflict(
        "curriculum", ANY, "the dataset", equal("a stream"),
        "it chooses among all prompts, and a stream is read one after the other",
        "load it whole, or remove curriculum",
    ),
)  # fmt: skip
