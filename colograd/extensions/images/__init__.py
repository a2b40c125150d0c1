"""Images in prompts and in tools' answers, for vision-language models."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "activations": "model:tower_of",
    "engine_feature": "engine.features:towers_of",
    "forward": "towers:step_of",
    "model_feature": "model:Images",
    "picture": "data:in_rgb",
    "prompt_reader": "data:reader_of",
    "proof_prompts": "data:proof_prompts",
    "riders": "rider:Images",
}
