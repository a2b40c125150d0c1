"""On-policy distillation: a teacher model's log-probabilities change the advantages, or its KL divergence the loss."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "run:CONFLICTS",
    "context": "teacher:check_teacher_context",
    "loaded_policy": "teacher:check_teacher",
    "loss_term": "losses:teacher_term",
    "prompt_columns": "run:prompt_columns",
    "second_model": ("teacher:LOGPROBS", "teacher:STATES", "teacher:TOP"),
    "train_prompts": "run:check_teacher_column",
    "without_rewards": "run:goes_without_rewards",
}
