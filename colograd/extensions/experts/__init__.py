"""Mixtures of experts: routing, the load-balancing loss, replayed routing."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS"}
