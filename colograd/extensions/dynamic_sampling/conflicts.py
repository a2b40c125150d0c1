"""Settings that can't be combined with `dynamic_sampling`."""

from __future__ import annotations

from ...config.conflicts import SET, Conflict, equal

CONFLICTS = (
    Conflict("dynamic_sampling", SET, "the dataset", equal("a stream"),
             "further rows are drawn at random, which a stream hasn't",
             "load it whole, or set dynamic_sampling: false"),
)  # fmt: skip
