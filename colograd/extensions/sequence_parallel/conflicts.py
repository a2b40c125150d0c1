"""Settings that can't be combined with `sequence_parallel_size` above 1, where ranks divide a row's tokens."""

from __future__ import annotations

import math

from ...config import GRPOConfig
from ...config.conflicts import SET, Conflict, above, equal
from ...runtime import process

SIZE = "sequence_parallel_size"

CONFLICTS = (
    Conflict(
        SIZE, above(1), "sharding", equal("fsdp"), "this version doesn't support both",
        "set sharding: gradients, or tensor+gradients for a policy that no rank has room for",
    ),
    *(
        Conflict(SIZE, above(1), name, SET, "this version doesn't support both", f"remove {name}, or {SIZE}")
        for name in ("torch_compile", "router_replay", "teacher_model_name_or_path", "offload_gradients")
    ),
)  # fmt: skip


def check_sequences(config: GRPOConfig) -> None:
    size = config.sequence_parallel_size
    if size == 1:
        return
    parts = config.vllm_tensor_parallel_size if config.tensor_parallel else 1
    ranks = math.gcd(config.world_size, process.local_world_size())
    if size < 1 or ranks % (size * parts):
        of_parts = f" times vllm_tensor_parallel_size ({parts})" if parts > 1 else ""
        able = [str(n) for n in range(1, ranks + 1) if not ranks % (n * parts)]
        raise ValueError(
            f"sequence_parallel_size ({size}){of_parts} must divide the number of ranks per machine, {ranks}: set "
            f"sequence_parallel_size to one of {', '.join(able)}."
        )
