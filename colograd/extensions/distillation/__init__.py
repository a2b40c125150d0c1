"""A teacher model, whose reverse KL divergence joins the loss."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "prompt_columns": "run:prompt_columns",
    "train_prompts": "run:check_teacher_column",
    "loaded_policy": "run:check_policy",
    "without_rewards": "run:goes_without_rewards",
    "context": "teacher:check_teacher_context",
}
