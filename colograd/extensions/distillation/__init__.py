"""A teacher model, whose reverse KL divergence joins the loss."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "loss_term": "losses:teacher_term",
    "second_model": ("second:LOGPROBS", "second:STATES", "second:TOP"),
}
