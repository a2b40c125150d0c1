"""Rows whose tokens are divided among ranks."""

HOOKS: dict[str, str | tuple[str, ...]] = {"loaded_policy": "run:check_policy"}
