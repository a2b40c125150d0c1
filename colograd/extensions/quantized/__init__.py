"""Bases of 4 or 8 bits below an adapter."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS"}
