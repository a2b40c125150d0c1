"""Prompts in an order that depends on their pass rates (`curriculum`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "tally": "curriculum:pass_rates",
    "train_prompts": "curriculum:add_curriculum",
}
