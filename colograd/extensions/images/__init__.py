"""Images in prompts, completions and tool answers."""

HOOKS: dict[str, str | tuple[str, ...]] = {"forward": "forward:step_of"}
