"""Images in prompts, completions and tool answers."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "activations": "memory:tower_of",
    "model_feature": "model:Images",
}
