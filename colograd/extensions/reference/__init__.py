"""The reference policy of the KL term: a frozen copy of the policy, or the policy with its adapter's initial values."""

HOOKS: dict[str, str | tuple[str, ...]] = {"loaded_policy": "model:check_reference", "second_model": "model:REFERENCE"}
