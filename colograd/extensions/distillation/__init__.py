"""On-policy distillation: a teacher's log-probabilities change the advantages, or a KL term is added to the loss."""

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
