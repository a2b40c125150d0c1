"""Python functions and environments that completions call."""

HOOKS: dict[str, str | tuple[str, ...]] = {"source": "feature:ToolFeature"}
