"""Setting `dynamic_sampling` (DAPO): prompts are sampled until each step has its number of groups with a difference."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS", "round": "rounds:dynamic_round"}
