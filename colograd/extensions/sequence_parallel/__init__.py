"""Rows whose tokens are divided among ranks."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS"}
