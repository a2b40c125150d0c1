"""Python functions and environments that completions call."""

HOOKS: dict[str, str | tuple[str, ...]] = {"conflicts": "conflicts:CONFLICTS", "source": "feature:ToolFeature"}
