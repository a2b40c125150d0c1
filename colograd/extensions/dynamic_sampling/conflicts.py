"""Settings that can't be combined with `dynamic_sampling`."""

from __future__ import annotations

from ...config.conflicts import SET, Conflict, equal

CONFLICTS = (
    Conflict("dynamic_sampling", SET, "the dataset", equal("a stream"),
             "further prompts are random rows, which a stream can't return",
             "load it whole, or set dynamic_sampling: false"),
)  # fmt: skip
