"""Images in prompts, completions and tool answers."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "activations": "memory:tower_of",
    "engine_feature": "engine.features:towers_of",
    "forward": "forward:step_of",
    "model_feature": "model:Images",
    "riders": "rider:Images",
}
