"""Settings that can't be combined with `sequence_parallel_size` above 1, where ranks divide a row's tokens."""

from __future__ import annotations

from ...config.conflicts import SET, Conflict, above, equal

SIZE = "sequence_parallel_size"

CONFLICTS = (
    Conflict(
        SIZE, above(1), "sharding", equal("fsdp"), "they don't go together in this version",
        "set sharding: gradients, or tensor+gradients for a policy that no rank has room for",
    ),
    *(
        Conflict(
            SIZE, above(1), name, SET,
            "that isn't available where ranks share out a row's tokens in this version", f"remove {name}, or {SIZE}",
        )
        for name in ("torch_compile", "router_replay", "teacher_model_name_or_path", "offload_gradients")
    ),
)  # fmt: skip
