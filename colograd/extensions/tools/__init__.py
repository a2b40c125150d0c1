"""Python functions (tools) and environments that the model calls during a completion."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "derived_metrics": "feature:call_metrics",
    "source": "feature:ToolFeature",
    "stages": "environments:lending_stages",
}
