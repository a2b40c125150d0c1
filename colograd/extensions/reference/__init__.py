"""The reference policy of the KL term: a frozen copy, or the policy without its adapter's training."""

HOOKS: dict[str, str | tuple[str, ...]] = {"loaded_policy": "model:check_policy", "second_model": "model:REFERENCE"}
