"""A check of the loaded policy in a run whose ranks hold parts of it."""

from __future__ import annotations

from ...config import GRPOConfig
from ...policy.loading import Policy
from ...weights import check_adapter_in_parts


def check_policy(policy: Policy, config: GRPOConfig, samples: bool) -> Policy:
    """Return the policy if it can lie in the layout of an engine's ranks."""
    if config.tensor_parallel and not samples:
        raise ValueError(
            f"sharding is {config.sharding!r}, but recorded steps are trained without an engine in whose layout the "
            "policy could lie: set sharding: gradients or fsdp."
        )
    if config.tensor_parallel:
        check_adapter_in_parts(policy.adapter, config.sharding)
    return policy
