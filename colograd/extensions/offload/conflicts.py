"""Settings that can't be combined with optimizer state or gradients in host memory."""

from __future__ import annotations

from ...config.conflicts import SET, Conflict, equal, other_than

CONFLICTS = (
    Conflict(
        "offload_gradients", SET, "sharding", equal("fsdp"),
        "fsdp moves gradients to the host only with a rank's rows of weights",
        "set fsdp_offload_params: true in its place, or sharding: gradients",
    ),
    Conflict(
        "offload_optimizer", equal("stream"), "optim", other_than("auto", "adamw_split"),
        "that optimizer's state can't pass through the GPU piece by piece",
        "set optim: adamw_split, or offload_optimizer: sampling",
        lambda settings: settings.streams_optimizer,
    ),
    Conflict(
        "offload_gradients", SET, "optim", other_than("auto", "adamw_split"),
        "that optimizer takes gradients only from the GPU", "set optim: adamw_split, or offload_gradients: false",
        lambda settings: settings.offloads_gradients,
    ),
)  # fmt: skip
