"""Dynamic sampling (DAPO): further prompts replace groups without a reward difference."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS", "round": "rounds:dynamic_round"}
