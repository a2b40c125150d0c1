"""Settings that can't be combined with `router_replay`."""

from __future__ import annotations

from ...config.conflicts import ANY, DRAFTS, SET, Conflict

CONFLICTS = (
    Conflict(
        "router_replay", SET, "torch_compile", SET,
        "a compiled layer doesn't take its experts from outside", "set one of them to false",
    ),
    Conflict(
        "router_replay", SET, DRAFTS, ANY, "vLLM would tell the experts of dropped drafts too", "remove one of them",
    ),
)  # fmt: skip
