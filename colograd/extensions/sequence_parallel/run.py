"""A check of the loaded policy in a run whose ranks share out rows."""

from __future__ import annotations

from ...config import GRPOConfig
from ...policy.loading import Policy
from ...policy.supported import check_shared_rows


def check_policy(policy: Policy, config: GRPOConfig, samples: bool) -> Policy:
    """Return the policy if its rows can be shared out among `sequence_parallel_size` ranks."""
    check_shared_rows(policy.model, config.sequence_parallel_size, policy.why_padded)
    return policy
