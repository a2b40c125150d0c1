"""Images in prompts, completions and tool answers."""

HOOKS: dict[str, str | tuple[str, ...]] = {"riders": "rider:Images"}
