"""Layers that are divided among the ranks of an engine, for training as for sampling."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS"}
