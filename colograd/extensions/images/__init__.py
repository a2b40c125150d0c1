"""Images in prompts, completions and tool answers."""

HOOKS: dict[str, str | tuple[str, ...]] = {"engine_feature": "engine.features:towers_of"}
