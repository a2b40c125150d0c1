"""Images in prompts, completions and tool answers."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "prompt_reader": "data:reader_of",
    "proof_prompts": "run:proof_prompts",
    "picture": "data:in_rgb",
}
